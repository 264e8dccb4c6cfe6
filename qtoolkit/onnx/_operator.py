"""`Operator`: one version of an operator, and the checks of arguments that all of them share."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from qtoolkit.casts.internal import hint_for_others, is_array
from qtoolkit.formats import Format
from qtoolkit.onnx._types import LATEST_OPSET, TYPES_OF_64_BITS, DataType, of_spec, of_value


@dataclasses.dataclass(frozen=True)
class Operator:
    """An operator as one opset has it. The errors of its checks begin with its name.

    Attributes:
      name: As users call it: "onnx.cast".
      opset: The version of the operator set.
      first: The opset that brought the operator.
    """

    name: str
    opset: int
    first: int

    def __post_init__(self) -> None:
        is_integer = isinstance(self.opset, int | np.integer) and not isinstance(self.opset, bool)
        if not is_integer or not self.first <= self.opset <= LATEST_OPSET:
            raise ValueError(
                f"{self.name}: opset={self.opset!r}, expected an integer from {self.first} to "
                f"{LATEST_OPSET}"
            )

    def check_choice(self, name: str, value: Any, allowed: tuple[Any, ...]) -> None:
        """ValueError where an attribute is not one of the allowed values.

        Arrays are refused, too, even those of one element that equal such a value: a traced one
        has no value to look at.
        """
        is_plain = isinstance(value, str | int | np.integer | np.bool_)
        if not is_plain or value not in allowed:
            expected = " or ".join(map(repr, allowed))
            raise ValueError(f"{self.name}: {name}={value!r}, expected {expected}")

    def check_since(self, name: str, value: Any, default: Any, since: int) -> None:
        """ValueError where an attribute that came with opset `since` is set in an older one."""
        if self.opset < since and value != default:
            raise ValueError(
                f"{self.name}: {name}={value!r} with opset={self.opset}, but the attribute came "
                f"with opset {since}; expected {name}={default!r} or a newer opset"
            )

    def check_type(self, name: str, dtype: DataType, types: Mapping[DataType, int]) -> None:
        """TypeError where the type came with a later opset, which `types` says, or is not in it."""
        if types.get(dtype, LATEST_OPSET + 1) > self.opset:
            since = f", which came with opset {types[dtype]}" if dtype in types else ""
            allowed = sorted(t.name for t, first in types.items() if first <= self.opset)
            raise TypeError(
                f"{self.name}: {name} is {dtype.name}{since}, with opset={self.opset}; expected "
                f"{', '.join(allowed)}"
            )

    def check_64_bits(self, dtype: DataType) -> None:
        """TypeError where JAX's 64-bit types are off and an array of that type needs them."""
        if dtype in TYPES_OF_64_BITS and not jax.config.read("jax_enable_x64"):
            raise TypeError(
                f"{self.name}: {dtype.name} is needed, and 64-bit types are off in JAX; enable "
                "them with jax.config.update('jax_enable_x64', True), or ask for fewer bits"
            )

    def data_type(self, name: str, value: Any) -> DataType:
        """The type that an attribute says by a number, a name, a dtype or a format."""
        try:
            dtype = of_spec(value)
        except TypeError:
            raise TypeError(
                f"{self.name}: {name} has type {type(value).__name__}, expected a number of "
                "TensorProto.DataType, the name of a type, or a dtype"
            ) from None
        if not dtype:  # None, or UNDEFINED, which is 0
            value = value.name if isinstance(value, Format) else value
            raise ValueError(
                f"{self.name}: {name}={value!r} is no type of ONNX, expected a number from 1 to "
                f"{max(DataType).value}, a name such as 'FLOAT8E4M3FN', or a dtype"
            )
        return dtype

    def optional_type(self, name: str, value: Any, since: int) -> DataType | None:
        """As `data_type`, for an optional attribute; None for None and 0."""
        is_number = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if value is None or (is_number and value == 0):
            return None
        self.check_since(name, value, None, since)
        return self.data_type(name, value)

    def type_of(self, name: str, x: Any, types: Mapping[DataType, int] | None = None) -> DataType:
        """The type of an array, a number of Python (64 bits) or a string.

        Raises:
          TypeError: It is none of these, of more bits, or of a dtype that ONNX lacks; or this
            version has no such type, which `types` says as for `check_type`.
        """
        if hasattr(x, "dtype") and not is_array(x):
            raise TypeError(f"{self.name}: {name} has type {type(x).__name__}, expected an array")
        return self.type_like(name, x, types)

    def type_like(self, name: str, x: Any, types: Mapping[DataType, int] | None = None) -> DataType:
        """As `type_of`, also for objects with a dtype but no elements."""
        if isinstance(x, int) and not -(2**63) <= x < 2**64:
            raise TypeError(
                f"{self.name}: {name} is an integer of more than 64 bits, expected fewer"
            )
        if isinstance(x, np.ma.MaskedArray):
            raise TypeError(f"{self.name}: {name} is a masked array, expected one without a mask")
        dtype = of_value(x)
        if dtype is None:
            has_dtype = getattr(x, "dtype", None) is not None
            got = f"dtype {x.dtype}" if has_dtype else f"type {type(x).__name__}"
            raise TypeError(
                f"{self.name}: {name} has {got}, expected an array of a type of ONNX"
                f"{hint_for_others(name, x)}"
            )
        if types is not None:
            self.check_type(name, dtype, types)
        return dtype
