"""A matmul of a program: where it stands, what is planted for it and how its state is named."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from qtoolkit.products._bilinear import (
    RAGGED,
    Bilinear,
    ConvGeneralDilated,
    DotGeneral,
    RaggedDot,
)
from qtoolkit.products._origins import Loop, Operands, Origin, Parameter
from qtoolkit.products._place import Place
from qtoolkit.products._taps import Seen

MATMULS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
SCALED = "scaled_dot"  # its operands are rounded already
_OF_CONVOLUTION = (
    *("window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers"),
    *("feature_group_count", "batch_group_count", "precision"),
)

Key = Place


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Planted:
    """What a matmul is given besides its operands.

    Attributes:
      arrays: A dictionary.
      shared: An array that all layers of a stack share, or None.
      lead: How many leading axes of `arrays` belong to scans that slice the kernel. Such a scan
        slices these arrays, too: each layer of a stack has its own.
    """

    arrays: Any
    shared: Any = None
    lead: int = dataclasses.field(default=0, metadata={"static": True})


class Matmul(NamedTuple):
    """A matmul of a program.

    Attributes:
      primitive: Its name in JAX.
      path, name: Where its state is. With a kernel: the module that owns it, and its name there,
        "up"; if the call uses it several times, also the place in the user's code,
        "up@attend@dot(x,s_up)" (`Site`). For two activations: the module that runs, and the place
        there, or a number in layers of Flax. "#2" follows for the second one at a place, as in a
        loop of Python.
      place: That place.
      parameter: The kernel, or None for two activations.
      kernel: Which operand that is: 0, 1, or None.
      module: The path of the module that runs; None if it is outside of all modules.
      call: Which call of the outermost module it is, if a function calls several.
      function: The matmul as a function of arrays; None for numbers that are not rounded.
      types: The types of its operands.
      origins: Where the first two come from.
      result: The type of the result.
      times: How often it runs; 1 in a `lax.while_loop`.
      around: "custom_vjp" where it lies in one, and stays as it is.
      is_derivative: Whether it is part of a derivative that the model itself takes.
      has_derivative: False inside of a `lax.while_loop`.
      where: The line of the program, "model.py:17".
      multiplications: Of numbers, in one run.
    """

    primitive: str
    path: str
    name: str
    place: str
    parameter: Parameter | None
    kernel: int | None
    module: str | None
    call: int
    function: Bilinear | None
    types: tuple[Any, ...]
    origins: tuple[Origin, Origin]
    result: Any
    times: int
    around: str
    is_derivative: bool
    has_derivative: bool
    where: str
    multiplications: int

    @property
    def key(self) -> Key:
        return Key(self.path, self.name)

    @property
    def is_stored(self) -> bool:
        """Whether its kernel is stored as codes."""
        return self.kernel is not None and bool(self.origins[self.kernel].stored)

    @property
    def loops(self) -> tuple[Loop, ...]:
        """The scans that slice the kernel."""
        return () if self.kernel is None else self.origins[self.kernel].loops

    @property
    def stack(self) -> tuple[int, ...]:
        """The lengths of these: the leading axes of its state."""
        return tuple(loop.length for loop in self.loops)

    @property
    def operands(self) -> Operands:
        assert self.function is not None
        first, second = self.origins
        return Operands(self.function, self.types, self.kernel, (first.features, second.features))


class Call(NamedTuple):
    """The operands with which a matmul runs.

    Attributes:
      lhs, rhs: A parameter comes as it is before its cast to 16 bits; a stored one as a `QArray`.
      extra: Integer arrays that the matmul takes besides.
      plain: Computes it as the user wrote it.
    """

    lhs: Any
    rhs: Any
    extra: tuple[Any, ...]
    plain: Callable[[], jax.Array]


Multiply = Callable[[Matmul, Call, Planted | None], tuple[Any, Seen | None]]


def names_of(matmuls: Sequence[Matmul]) -> list[str]:
    """The names of matmuls within their modules, see `Matmul`."""
    uses, counts = Counter(map(_use_of, matmuls)), Counter[Any]()
    names = []
    for matmul in matmuls:
        name = matmul.name if uses[_use_of(matmul)] == 1 else _placed(matmul)
        name = name if matmul.parameter is not None else matmul.place
        call = matmul.call, matmul.is_derivative, matmul.path, name
        count = counts[call]
        counts[call] += 1
        if not name:
            name = str(count)
        elif count:
            name = f"{name}#{count + 1}"
        names.append(f"{name}'" if matmul.is_derivative else name)
    return names


def _use_of(matmul: Matmul) -> Any:
    """What all uses of a kernel in a call share."""
    return matmul.call, matmul.is_derivative, matmul.path, matmul.parameter


def _placed(matmul: Matmul) -> str:
    """The name of a kernel that a call uses several times, or of two activations, at a place."""
    return matmul.place if matmul.parameter is None else f"{matmul.parameter.name}@{matmul.place}"


def matching(matmuls: Sequence[Matmul], known: Collection[Key]) -> dict[Key, Key]:
    """Which of the known states belongs to which matmul, by keys.

    A state was made for a use of a kernel, or for a place, in another call. Python may take another
    path in this one. A state belongs to the only use of a kernel, in this call and in that. Of
    several uses, and of two activations, it belongs to the one at the same place, if as many
    are there. A matmul without one has a current scale.
    """
    states = Counter(Key(path, name.split("#")[0]) for path, name in known)
    uses = Counter(map(_use_of, matmuls))
    here = Counter((matmul.call, matmul.path, _placed(matmul)) for matmul in matmuls)
    found: dict[Key, Key] = {}
    for matmul in matmuls:
        key, placed = matmul.key, Key(matmul.path, _placed(matmul))
        is_only = matmul.parameter is not None and uses[_use_of(matmul)] == 1
        if is_only and key not in known and states[placed] == 1:
            key = placed  # that call used the kernel at other places, too
        is_alike = is_only or states[placed] in (0, here[matmul.call, *placed])
        if key in known and is_alike:
            found[matmul.key] = key
    return found


def is_matmul(eqn: Any) -> bool:
    """Whether an equation is a matmul: not one of empty arrays, nor one that sums over nothing."""
    name = eqn.primitive.name
    if name not in (*MATMULS, SCALED) or not multiplications_of(eqn):
        return False
    return name != "dot_general" or bool(eqn.params["dimension_numbers"][0][0])


def function_of(eqn: Any) -> Bilinear | None:
    """A matmul as a function; None for integers, and for ragged ones but `lax.ragged_dot`."""
    params = eqn.params
    if not all(jnp.issubdtype(x.aval.dtype, jnp.floating) for x in eqn.invars[:2]):
        return None
    match eqn.primitive.name:
        case "dot_general":
            names = ("dimension_numbers", "precision", "out_sharding")
            return DotGeneral(**{name: params[name] for name in names})
        case "scaled_dot":
            return None
        case "ragged_dot_general":
            numbers = params["ragged_dot_dimension_numbers"]
            is_usual = numbers == RAGGED and params["group_offset"] is None
            return RaggedDot(params["precision"]) if is_usual else None
    return ConvGeneralDilated(**{name: params[name] for name in _OF_CONVOLUTION})


def multiplications_of(eqn: Any) -> int:
    """How many multiplications of numbers the matmul in an equation takes."""
    lhs, rhs = (x.aval.shape for x in eqn.invars[:2])
    params = eqn.params
    if eqn.primitive.name == "conv_general_dilated":
        features = params["dimension_numbers"].rhs_spec[0]
        summed = (n for i, n in enumerate(rhs) if i != features)
        return math.prod(eqn.outvars[0].aval.shape) * math.prod(summed)
    groups: Any = ()
    numbers = params.get("dimension_numbers")
    if numbers is None:  # of ragged_dot_general
        ragged = params["ragged_dot_dimension_numbers"]
        numbers, groups = ragged.dot_dimension_numbers, ragged.rhs_group_dimensions
    (_, contracted), (_, batch) = numbers
    kept = (n for i, n in enumerate(rhs) if i not in {*contracted, *batch, *groups})
    return math.prod(lhs) * math.prod(kept)
