"""Two's-complement and unsigned integer formats as frozen data."""

import dataclasses
from fractions import Fraction
from typing import ClassVar

import ml_dtypes  # also registers the sub-byte integer names with numpy

from qtoolkit.formats._element import ElementFormat, hashed_once, plain_number


@hashed_once
@dataclasses.dataclass(frozen=True, kw_only=True)
class IntFormat(ElementFormat):
    """An integer format. Frozen, hence hashable: a static argument of `jax.jit`.

    Attributes:
      name: As users write it, on the command line and in checkpoints.
      bits: Width of a code, 1 to 64.
      signed: Two's complement if true.
      is_bool: Whether the format is the truth value: one unsigned bit, which a cast sets to 1 for
        whatever is not zero, so 0.25 becomes 1, where uint1 makes it 0.
      dtype_name: The numpy name of the format's own dtype; None where there is none.
      spellings: Other names of the same format (ONNX, OpenVINO, safetensors); no part of equality.

    Examples:
      >>> int3 = qt.IntFormat(name="int3", bits=3)
      >>> int(int3.lowest), int(int3.max_finite)
      (-4, 3)
      >>> qt.round_to_format(jnp.asarray([0.5, 1.5, 9.0]), int3)  # ties to even, then clamped
      Array([0., 2., 3.], dtype=float32)
      >>> qt.format("int8").with_(bits=5, name="int5").max_finite
      Fraction(15, 1)
    """

    name: str
    bits: int
    signed: bool = True
    is_bool: bool = False
    dtype_name: str | None = None
    spellings: tuple[str, ...] = dataclasses.field(default=(), compare=False, repr=False)

    min_normal: ClassVar[Fraction] = Fraction(1)
    min_positive: ClassVar[Fraction] = Fraction(1)
    epsilon: ClassVar[Fraction] = Fraction(1)
    has_inf: ClassVar[bool] = False
    has_nan: ClassVar[bool] = False
    inf_code: ClassVar[None] = None
    nan_code: ClassVar[None] = None  # casts write NaN as 0
    nan_codes: ClassVar[tuple[int, ...]] = ()
    needs_scale: ClassVar[bool] = True  # whatever its width

    def __post_init__(self) -> None:
        self._check_name()
        for field in ("signed", "is_bool"):
            if not isinstance(getattr(self, field), bool):
                raise TypeError(
                    f"IntFormat {self.name!r}: {field}={getattr(self, field)!r}, expected bool"
                )
        object.__setattr__(self, "bits", plain_number(self.bits))
        if type(self.bits) is not int or not 1 <= self.bits <= 64:
            raise ValueError(f"IntFormat {self.name!r}: bits={self.bits!r}, expected 1 to 64")
        if self.is_bool and (self.bits != 1 or self.signed):
            raise ValueError(
                f"IntFormat {self.name!r}: is_bool=True with bits={self.bits}, "
                f"signed={self.signed}; expected bits=1, signed=False"
            )
        if self.dtype_name == "bool" and not self.is_bool:
            raise ValueError(
                f"IntFormat {self.name!r}: dtype_name='bool' with is_bool={self.is_bool!r}, "
                "expected is_bool=True"
            )
        self._check_dtype("integers", ml_dtypes.iinfo)

    @property
    def max_finite(self) -> Fraction:
        """The largest value: 127 for int8."""
        return Fraction(2 ** (self.bits - self.signed) - 1)

    @property
    def lowest(self) -> Fraction:
        """The smallest value: -128 for int8."""
        return Fraction(-(2 ** (self.bits - 1)) if self.signed else 0)

    @property
    def mantissa_bits(self) -> int:
        """Significand bits after the leading one that a float needs to hold every value."""
        return max(self.bits - self.signed - 1, 0)

    @property
    def finite_count(self) -> int:
        return 2**self.bits

    @property
    def max_code(self) -> int:
        """Code of the largest value."""
        return int(self.max_finite)

    def value(self, code: int) -> Fraction:
        """The integer that `code` stands for.

        Raises:
          TypeError: `code` is no integer.
          ValueError: It is negative, or 2**bits or more.
        """
        code = self._checked_code(code)
        return Fraction(code - (2**self.bits if code > self.max_finite else 0))
