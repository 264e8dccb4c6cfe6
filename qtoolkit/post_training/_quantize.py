"""`quantize` for both Flax packages: the kernels of a model become codes and scales.

nnx and linen each say, through a `Served`, which kernels there are and how to store one.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from qtoolkit.post_training._methods import PlainModel, Settings, tuned
from qtoolkit.post_training._storing import stored_kernel, with_leading_axes
from qtoolkit.products import Operand
from qtoolkit.products.internal import Axes, joined_amax
from qtoolkit.scaling import QArray


class Storable(NamedTuple):
    """A kernel that `quantize` may store.

    Attributes:
      name: The parameter, as post-training methods know it: "layers/0/kernel".
      where: Starts error messages.
      value: The kernel or a stack of them, a `QArray` if it is stored already.
      operand, axes: How its matmul rounds it, an `Operand`, and its axes there.
      stacked: How many leading axes are those of a stack.
      state: What the layer keeps for it, see `of_kernel`.
      is_table: Whether it is looked up: then it is rounded to nearest, whatever the method.
    """

    name: str
    where: str
    value: Any
    operand: Any
    axes: Axes
    stacked: int
    state: tuple[Any, ...] = (None, None, None, None)
    is_table: bool = False


class Served(Protocol):
    """A model that gets stored kernels from `quantize`."""

    def kernels(self) -> Iterable[tuple[Any, Storable]]:
        """The kernels that can be stored, each with what `store` takes."""

    def plain(self) -> PlainModel:
        """The model before `wrap`, for methods that run it."""

    def take(self, params: Mapping[str, Any]) -> None:
        """Gives the model other values of its parameters, by name."""

    def store(self, place: Any, array: QArray) -> None: ...


def quantize_kernels(model: Served, calibration: Any, how: Settings) -> bool:
    """Stores the kernels of a model. Returns whether there was one."""
    made: Mapping[str, QArray] = {}
    if how.needs_inputs:
        operands: dict[str, Operand] = {}
        for _, kernel in model.kernels():
            if kernel.is_table:
                continue
            if operands.setdefault(kernel.name, kernel.operand) != kernel.operand:
                raise ValueError(
                    f"{kernel.where} is shared with another layer, {kernel.name}, whose recipe "
                    f"rounds it by {operands[kernel.name]}, expected one format for a kernel that "
                    f"a method quantizes, got {kernel.operand}; give both layers one recipe"
                )
        plain = model.plain()
        made, params = tuned(plain, operands, calibration, how)
        if params is not plain.params:
            model.take(params)
    kernels = list(model.kernels())
    parameters = {kernel.name: kernel.value for _, kernel in kernels}
    for place, kernel in kernels:
        array = kernel.value if isinstance(kernel.value, QArray) else made.get(kernel.name)
        if array is not None:
            array = with_leading_axes(array, kernel.stacked)
        else:
            stack = kernel.value.shape[: kernel.stacked]
            joined = joined_amax(kernel.operand, kernel.name, parameters, stack)
            amax, *state = kernel.state
            array = stored_kernel(
                kernel.where,
                kernel.value,
                kernel.operand,
                kernel.axes,
                kernel.stacked,
                amax if joined is None else joined,
                *state,
            )
        model.store(place, array)
    return bool(kernels)
