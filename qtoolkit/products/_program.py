"""A function of arrays, traced once, and run with its matmuls computed otherwise.

    program = Program.of(function, inputs, parameters)        # one trace, no numbers
    program.matmuls                                           # what a report prints
    outs, seen = program.run(inputs, multiply, planted)       # numbers

`multiply(matmul, call, planted)` computes one matmul. It returns the result, or None for the matmul
as the user wrote it; and what it has seen, a `Seen`. What is planted for a matmul (scales, keys,
probes) and what is seen of it go by the matmul's key. Both pass through all loops: what is planted
is an operand of the body, what is seen is one more result of it. This file alone walks loops:
`_Finder` once, to know which matmuls there are, and `_RULES`, to run them.

A matmul belongs to the module that owns its kernel, whichever module computes it. A matmul of two
activations belongs to the module that runs, which says so by a name scope (`_calls`).
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Literal

from qtoolkit.products._bilinear import (
    RAGGED,
    Bilinear,
    ConvGeneralDilated,
    DotGeneral,
    RaggedDot,
)
from qtoolkit.products._lines import librarys_line, place_of, users_line
from qtoolkit.products._origins import (
    ACTIVATION,
    CONSTANT,
    Loop,
    Operands,
    Origin,
    Parameter,
    Step,
    original_of,
    origins_after,
)
from qtoolkit.products._seen import Seen
from qtoolkit.scaling import QArray

MATMULS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
SCALED = "scaled_dot"  # its operands are rounded already
QUANTIZED_MATMUL = "qtoolkit_product"  # the jitted function around each quantized matmul
_INLINED = ("jit", "pjit", "closed_call", "core_call")
_REMAT = ("checkpoint", "remat", "remat2")
_LOOPS = (*_INLINED, *_REMAT, "scan", "while", "cond", "shard_map")
# Functions whose derivative the user has defined. They stay as they are, because that derivative is
# of exactly this function.
_OPAQUE = {
    "custom_vjp_call": "custom_vjp",
    "custom_vjp_call_jaxpr": "custom_vjp",
    "custom_jvp_call": "custom_jvp",
}
_OF_CONVOLUTION = (
    *("window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers"),
    *("feature_group_count", "batch_group_count", "precision"),
)

Key = tuple[str, str]  # of a matmul: the path of its module, and its name there


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
        "up"; if the call uses it several times, also the place in the user's code, "up@attend@3:12"
        (`place_of`). For two activations: the module that runs, and the place there, or a number in
        layers of Flax. "#2" follows for the second one at a place, as in a loop of Python.
      place: That place.
      parameter: The kernel, or None for two activations.
      kernel: Which operand that is: 0, 1, or None.
      module: The path of the module that runs; None if it is outside of all modules.
      call: Which call of the outermost module it is, if a function calls several.
      function: The matmul as a function of arrays; None for numbers that are not rounded.
      types: The types of its operands.
      origins: Where the first two come from.
      dtype: Of the result.
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
    dtype: Any
    times: int
    around: str
    is_derivative: bool
    has_derivative: bool
    where: str
    multiplications: int

    @property
    def key(self) -> Key:
        return self.path, self.name

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


class _Block(NamedTuple):
    """A jaxpr with what was found in it.

    Attributes:
      at: Where it stands in the program: the numbers of the equations around it.
      matmuls: Those among its equations, by number.
      bodies: The jaxprs in its equations, where these hold matmuls.
      casts: The casts of parameters to 16 bits among its equations.
    """

    jaxpr: Any
    consts: Sequence[Any]
    at: tuple[int, ...]
    matmuls: dict[int, Matmul]
    bodies: dict[int, tuple["_Block", ...]]
    casts: frozenset[int]

    @property
    def all_matmuls(self) -> list[Matmul]:
        found = []
        for number in sorted({*self.matmuls, *self.bodies}):
            if number in self.matmuls:
                found.append(self.matmuls[number])
            for block in self.bodies.get(number, ()):
                found += block.all_matmuls
        return found


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced function of arrays.

    Attributes:
      static: What the function returned besides arrays.
      other_uses: The parameters that something else than a matmul uses, too, or that the function
        returns.
    """

    block: _Block
    static: Any
    other_uses: frozenset[Parameter]

    @classmethod
    def of(
        cls,
        function: Callable[[list[Any]], tuple[Any, Any]],
        inputs: Sequence[Any],
        parameters: Sequence[Parameter | None],
        axes: Sequence[tuple[str, int]] = (),
    ) -> "Program":
        """Traces a function of a list of arrays, which returns a pytree of arrays and static data.

        Args:
          inputs: A `QArray` among them is a float array for the function. A matmul gets it as it is.
          parameters: For each input its name if it is a parameter, else None.
          axes: Names and sizes of axes that the function may ask for.
        """
        static: list[Any] = []

        def traced(inputs: list[Any]) -> Any:
            arrays, other = function(inputs)
            static.append(other)
            return arrays

        seen_as = [_as_float(x) for x in inputs]
        closed = jax.make_jaxpr(traced, axis_env=list(axes))(seen_as)
        finder = _Finder()
        pairs = zip(parameters, inputs, strict=True)
        block, outs = finder.block(closed, [Origin.of(*pair) for pair in pairs])
        block = _renamed(block, iter(_names_of(block.all_matmuls)))
        returned = {x.parameter for x in outs if x.order is not None and x.parameter is not None}
        return cls(block, static[-1], frozenset(finder.other_uses | returned))

    @property
    def matmuls(self) -> list[Matmul]:
        return self.block.all_matmuls

    def run(
        self, inputs: Sequence[Any], multiply: Multiply, planted: Mapping[Key, Planted]
    ) -> tuple[list[Any], dict[Key, Seen]]:
        """The results of the function, flat, and what was seen of each matmul."""
        return _run(self.block, list(inputs), multiply, planted)


def _as_float(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, QArray) else x


# Name scopes with these prefixes say which module runs, and which call of the outermost one it is.
SCOPE, CALL = "qtoolkit:", "qtoolkit-call:"


class _Around(NamedTuple):
    """What is known of the equations around a jaxpr."""

    module: str | None = None
    call: int = 0
    times: int = 1
    opaque: str = ""
    is_derivative: bool = False
    has_derivative: bool = True
    line: str = ""
    functions: tuple[tuple[tuple[str, str], str], ...] = ()  # jitted: their places and names

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the jitted functions around."""
        return tuple(name for _, name in self.functions)

    def places(self, eqn: Any) -> tuple[str, str]:
        """The places of an equation in the module that runs, and in the one that is called."""
        around = [places for places, _ in self.functions]
        inner, outer = zip(*around, place_of(eqn, self.names), strict=True)
        return ".".join(filter(None, inner)), ".".join(filter(None, outer))

    def within(self, eqn: Any) -> "_Around":
        """The same for an equation: its name stack says more."""
        module, call, derivative = self.module, self.call, self.is_derivative
        for part in eqn.source_info.name_stack.stack:
            name = str(getattr(part, "name", ""))
            if name.startswith(CALL):
                number, _, module = name.removeprefix(CALL).partition(":")
                call = int(number)
            elif name.startswith(SCOPE):
                module = name.removeprefix(SCOPE)
            elif name == "transpose" and type(part).__name__ == "Transform":
                derivative = True
        return self._replace(module=module, call=call, is_derivative=derivative)

    def inside(self, eqn: Any) -> "_Around":
        """The same for the jaxprs in an equation."""
        name, params = eqn.primitive.name, eqn.params
        functions = self.functions
        if name in ("jit", "pjit"):
            functions = (*functions, (place_of(eqn, self.names), params["name"]))
        return self._replace(
            times=self.times * _runs_of(eqn),
            opaque=_OPAQUE.get(name, name) if _is_opaque(eqn) else self.opaque,
            has_derivative=self.has_derivative and name != "while",
            line=users_line(eqn) or self.line,
            functions=functions,
        )


class _Finder:
    """Finds the matmuls of a jaxpr, with what is known of their operands.

    Attributes:
      other_uses: See `Program`.
    """

    def __init__(self) -> None:
        self.other_uses: set[Parameter] = set()

    def block(
        self,
        closed: ClosedJaxpr,
        origins: Sequence[Origin],
        around: _Around = _Around(),
        at: tuple[int, ...] = (),
    ) -> tuple[_Block, list[Origin]]:
        """A jaxpr whose inputs come from `origins`, and the origins of its results."""
        jaxpr = closed.jaxpr
        known: dict[Any, Origin] = dict(zip(jaxpr.invars, origins, strict=True))
        known.update(dict.fromkeys(jaxpr.constvars, CONSTANT))

        def of(x: Any) -> Origin:
            return CONSTANT if isinstance(x, Literal) else known[x]

        matmuls: dict[int, Matmul] = {}
        bodies: dict[int, tuple[_Block, ...]] = {}
        casts: set[int] = set()
        for number, eqn in enumerate(jaxpr.eqns):
            inputs, here = [of(x) for x in eqn.invars], around.within(eqn)
            if _is_matmul(eqn):
                matmuls[number] = self._matmul(eqn, inputs, here)
                results = [_result_of(matmuls[number])]
            elif _has_bodies(eqn):
                inner = here.inside(eqn)
                blocks, results = self._inside(eqn, inputs, inner, (*at, number))
                if any(block.matmuls or block.bodies for block in blocks):
                    bodies[number] = tuple(blocks)
            else:
                step = Step.of(eqn)
                results = origins_after(step, inputs)
                self._note_uses(inputs, results)
                if step.is_cast_to_half and results[0].parameter is not None:
                    casts.add(number)
            known.update(zip(eqn.outvars, results, strict=True))
        block = _Block(jaxpr, closed.consts, at, matmuls, bodies, frozenset(casts))
        return block, [of(x) for x in jaxpr.outvars]

    def _note_uses(self, inputs: Sequence[Origin], results: Sequence[Origin]) -> None:
        """Notes the parameters that an operation uses, unless it only transposes or casts one."""
        if not results or results[0].order is None:
            used = (x.parameter for x in inputs if x.order is not None)
            self.other_uses.update(x for x in used if x is not None)

    def _inside(
        self, eqn: Any, inputs: Sequence[Origin], around: _Around, at: tuple[int, ...]
    ) -> tuple[list[_Block], list[Origin]]:
        """The bodies of an equation, and the origins of its results."""
        params, name = eqn.params, eqn.primitive.name
        if _is_opaque(eqn):
            blocks = []
            for which, closed in enumerate(_jaxprs_in(params)):
                count = len(closed.jaxpr.invars)
                known = inputs if len(inputs) == count else [ACTIVATION] * count
                blocks.append(self.block(closed, known, around, (*at, which))[0])
            self._note_uses(inputs, [])
            return blocks, origins_after(Step.of(eqn), inputs)
        if name == "cond":
            pairs = [
                self.block(branch, inputs[1:], around, (*at, which))
                for which, branch in enumerate(params["branches"])
            ]
            outs = [outs for _, outs in pairs]
            return [block for block, _ in pairs], [_merged(*same) for same in zip(*outs)]
        if name == "scan":
            fixed, carries = scan_lengths(params)
            loop = Loop(at, params["length"])
            xs = [x.sliced(loop) for x in inputs[fixed + carries :]]
            carry = _carried(params["jaxpr"], inputs[:fixed], inputs[fixed:][:carries], xs)
            block, outs = self.block(params["jaxpr"], [*inputs[:fixed], *carry, *xs], around, at)
            return [block], [*outs[:carries], *(x._replace(order=None) for x in outs[carries:])]
        if name == "while":
            first, second = params["cond_nconsts"], params["body_nconsts"]
            of_test, of_step, carry = (
                inputs[:first],
                inputs[first:][:second],
                inputs[first + second :],
            )
            carry = _carried(params["body_jaxpr"], of_step, carry, [])
            test, _ = self.block(params["cond_jaxpr"], [*of_test, *carry], around, (*at, 0))
            step, outs = self.block(params["body_jaxpr"], [*of_step, *carry], around, (*at, 1))
            return [test, step], [x._replace(is_trained=False) for x in outs]
        (closed,) = _jaxprs_in(params)
        block, outs = self.block(closed, inputs, around, at)
        return [block], outs

    def _matmul(self, eqn: Any, inputs: Sequence[Origin], around: _Around) -> Matmul:
        parameters = [x.parameter for x in inputs[:2]]
        kernel = 1 if parameters[1] is not None else 0 if parameters[0] is not None else None
        for side, x in enumerate(inputs[:2]):  # a product of two parameters is no matmul of a layer
            if x.parameter is not None and parameters[1 - side] is not None:
                self.other_uses.add(x.parameter)
        parameter = None if kernel is None else parameters[kernel]
        inner, outer = around.places(eqn)
        return Matmul(
            primitive=eqn.primitive.name,
            path=(around.module or "") if parameter is None else parameter.path,
            name="" if parameter is None else parameter.name,
            place=inner if parameter is None else outer,
            parameter=parameter,
            kernel=kernel,
            module=around.module,
            call=around.call,
            function=_function(eqn),
            types=tuple(x.aval for x in eqn.invars),
            origins=(inputs[0], inputs[1]),
            dtype=eqn.outvars[0].aval.dtype,
            times=around.times,
            around=around.opaque,
            is_derivative=around.is_derivative,
            has_derivative=around.has_derivative,
            where=users_line(eqn) or around.line or librarys_line(eqn),
            multiplications=multiplications_of(eqn),
        )


def _names_of(matmuls: Sequence[Matmul]) -> list[str]:
    """The names of matmuls within their modules, see `Matmul`."""
    calls = [(m.call, m.is_derivative, m.path, m.name) for m in matmuls]
    uses, counts = Counter(calls), Counter[Any]()
    names = []
    for matmul, call in zip(matmuls, calls, strict=True):
        is_alone = matmul.parameter is not None and uses[call] == 1
        name = "@".join(filter(None, (matmul.name, "" if is_alone else matmul.place)))
        count = counts[call, name]
        counts[call, name] += 1
        if not name:
            name = str(count)
        elif count:
            name = f"{name}#{count + 1}"
        names.append(f"{name}'" if matmul.is_derivative else name)
    return names


def _renamed(block: _Block, names: Iterator[str]) -> _Block:
    """A block with other names of its matmuls, in the order of `all_matmuls`."""
    matmuls, bodies = dict(block.matmuls), dict(block.bodies)
    for number in sorted({*matmuls, *bodies}):
        if number in matmuls:
            matmuls[number] = matmuls[number]._replace(name=next(names))
        bodies |= {
            number: tuple(_renamed(inner, names) for inner in bodies[number])
            for number in (number,)
            if number in bodies
        }
    return block._replace(matmuls=matmuls, bodies=bodies)


def matching(matmuls: Sequence[Matmul], known: Collection[Key]) -> dict[Key, Key]:
    """Which of the known states belongs to which matmul, by keys.

    A state was made for a use of a kernel, or for a place, in another call. Python may take another
    path in this one. A state belongs to the only use of a kernel, in this call and in that. Of
    several uses, and of two activations, it belongs to the one at the same place, if as many
    are there. A matmul without one has a current scale.
    """
    counts = Counter((path, name.split("#")[0]) for path, name in known)
    uses: dict[Any, dict[Key, Matmul]] = {}
    for matmul in matmuls:
        base = matmul.path, "@".join(filter(None, (_kernel_of(matmul), matmul.place)))
        uses.setdefault(base, {})[matmul.key] = matmul
    found: dict[Key, Key] = {}
    for base, here in uses.items():
        alone = next(iter(here)) if len(here) == 1 else None
        for key, matmul in here.items():
            is_only = alone is not None and key[1] == _kernel_of(matmul)
            if is_only and key in known:
                found[key] = key
            elif is_only and counts[base] == 1 and base in known:
                found[key] = base
            elif not is_only and key in known and counts[base] in (0, len(here)):
                found[key] = key
    return found


def _kernel_of(matmul: Matmul) -> str:
    return "" if matmul.parameter is None else matmul.parameter.name


def _is_matmul(eqn: Any) -> bool:
    """Whether an equation is a matmul: not one of empty arrays, nor one that sums over nothing."""
    name = eqn.primitive.name
    if name not in (*MATMULS, SCALED) or not multiplications_of(eqn):
        return False
    return name != "dot_general" or bool(eqn.params["dimension_numbers"][0][0])


def _has_bodies(eqn: Any) -> bool:
    name = eqn.primitive.name
    if name in _INLINED and eqn.params.get("name") == QUANTIZED_MATMUL:
        return False
    return name in _LOOPS or bool(_jaxprs_in(eqn.params))


def _is_opaque(eqn: Any) -> bool:
    """Whether the matmuls inside stay as they are: `_OPAQUE`, and what this file does not know."""
    return eqn.primitive.name not in _LOOPS


def _function(eqn: Any) -> Bilinear | None:
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


def _result_of(matmul: Matmul) -> Origin:
    """What is known of the result of a matmul."""
    if all(x.is_constant for x in matmul.origins):
        return CONSTANT
    is_trained = any(x.is_trained for x in matmul.origins)
    if matmul.function is None:
        return Origin(is_trained=is_trained and jnp.issubdtype(matmul.dtype, jnp.inexact))
    return Origin(is_trained=is_trained, features=matmul.operands.features_of_result)


def _jaxprs_in(params: Mapping[str, Any]) -> list[ClosedJaxpr]:
    """The jaxprs among the parameters of an equation, alone or in lists."""
    found = []
    for value in params.values():
        for item in value if isinstance(value, list | tuple) else [value]:
            if hasattr(item, "eqns") or hasattr(getattr(item, "jaxpr", None), "eqns"):
                found.append(item if hasattr(item, "consts") else ClosedJaxpr(item, ()))
    return found


def scan_lengths(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many constants and how many carried values a scan has."""
    if "ft_in" in params:  # jax 0.12: three trees of consts, carry and xs
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]


def _merged(*origins: Origin) -> Origin:
    first, *others = origins
    for other in others:
        first = first.merged(other)
    return first


def _carried(
    body: ClosedJaxpr, consts: Sequence[Origin], carry: Sequence[Origin], xs: Sequence[Origin]
) -> list[Origin]:
    """The origins of what a loop carries: what holds before its first step and after each one."""
    carry = list(carry)
    while True:
        _, after = _Finder().block(body, [*consts, *carry, *xs])
        merged = [_merged(*pair) for pair in zip(carry, after, strict=False)]
        if merged == carry:
            return carry
        carry = merged


def _runs_of(eqn: Any) -> int:
    """How often the jaxprs in an equation run; 1 if that is not known: in `lax.while_loop`."""
    if eqn.primitive.name == "scan":
        return int(eqn.params["length"])
    if eqn.primitive.name == "shard_map":
        sizes = eqn.params["mesh"].shape
        return math.prod(sizes[axis] for axis in _manual_axes(eqn.params))
    return 1


def _manual_axes(params: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(params.get("manual_axes", params.get("newly_manual_axes", ())))


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


# Numbers.


def _merge(first: dict[Key, Seen], second: Mapping[Key, Seen]) -> dict[Key, Seen]:
    for key, (largest, total) in second.items():
        if key in first:
            largest = jax.tree.map(jnp.maximum, first[key].largest, largest)
            total = jax.tree.map(jnp.add, first[key].total, total)
        first[key] = Seen(largest, total)
    return first


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Cast:
    """A parameter that was cast to 16 bits, with the original, on its way into a body."""

    array: Any
    original: Any


def _run(
    block: _Block, args: Sequence[Any], multiply: Multiply, planted: Mapping[Key, Planted]
) -> tuple[list[Any], dict[Key, Seen]]:
    """Runs a jaxpr. Its arguments may be `QArray`s and `_Cast`s."""
    jaxpr, seen = block.jaxpr, dict[Key, Seen]()
    values = dict(zip(jaxpr.constvars, block.consts, strict=True))
    originals: dict[Any, Any] = {}
    for variable, x in zip(jaxpr.invars, args, strict=True):
        if isinstance(x, QArray | _Cast):
            is_cast = isinstance(x, _Cast)
            originals[variable] = x.original if is_cast else x
            x = x.array if is_cast else x.dequantize()
        values[variable] = x

    def read(x: Any) -> Any:
        return x.val if isinstance(x, Literal) else values[x]

    def original(x: Any) -> Any:
        return None if isinstance(x, Literal) else originals.get(x)

    def operand(x: Any) -> Any:
        found = original(x)
        return read(x) if found is None else found

    def argument(x: Any) -> Any:
        found = original(x)
        return found if found is None or isinstance(found, QArray) else _Cast(read(x), found)

    for number, eqn in enumerate(jaxpr.eqns):
        inputs = [read(x) for x in eqn.invars]
        info = eqn.source_info
        stack = source_info_util.current_name_stack() + info.name_stack
        with source_info_util.user_context(info.traceback, name_stack=stack), eqn.ctx.manager:
            if number in block.matmuls:
                matmul = block.matmuls[number]
                plain = _Plain(eqn, inputs)
                call = Call(operand(eqn.invars[0]), operand(eqn.invars[1]), (*inputs[2:],), plain)
                out, own = multiply(matmul, call, planted.get(matmul.key))
                outs = [plain() if out is None else out]
                if own is not None:
                    _merge(seen, {matmul.key: own})
            elif number in block.bodies and not _is_opaque(eqn):
                inner = _Inner(block.bodies[number], multiply, planted)
                given = [x if y is None else y for x, y in zip(inputs, map(argument, eqn.invars))]
                outs, own_seen = _RULES[eqn.primitive.name](inner, eqn.params, given)
                _merge(seen, own_seen)
            else:
                outs = _bound(eqn, inputs)
                first = eqn.invars[0] if eqn.invars else None
                if len(outs) == 1 and (original(first) is not None or number in block.casts):
                    bind = lambda x: _bound(eqn, [x, *inputs[1:]])[0]  # noqa: B023, E731
                    found = original_of(Step.of(eqn), bind, inputs[0], original(first))
                    if found is not None:
                        originals[eqn.outvars[0]] = found
        values.update(zip(eqn.outvars, outs, strict=True))
    return [read(x) for x in jaxpr.outvars], seen


class _Plain(NamedTuple):
    """A matmul as the user wrote it."""

    eqn: Any
    inputs: Sequence[Any]

    def __call__(self) -> Any:
        return _bound(self.eqn, self.inputs)[0]


def _bound(eqn: Any, values: Sequence[Any]) -> list[Any]:
    out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


class _Inner(NamedTuple):
    """The bodies of an equation, as functions that also return what their matmuls saw."""

    blocks: tuple[_Block, ...]
    multiply: Multiply
    planted: Mapping[Key, Planted]

    def run(
        self,
        args: Sequence[Any],
        planted: Mapping[Key, Planted] | None = None,
        which: int = 0,
    ) -> tuple[list[Any], dict[Key, Seen]]:
        block = self.blocks[which]
        return _run(block, args, self.multiply, self.planted if planted is None else planted)

    def nothing(self, which: int, args: Sequence[Any]) -> dict[Key, Seen]:
        """Zeros like what a body sees, for a branch that did not run, a loop that has not begun."""
        types = jax.eval_shape(lambda args: self.run(args, which=which)[1], list(args))
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), types)


_Ran = tuple[list[Any], dict[Key, Seen]]


def _inlined(inner: _Inner, params: Mapping[str, Any], args: Sequence[Any]) -> _Ran:
    return inner.run(args)


def _remat(inner: _Inner, params: Mapping[str, Any], args: Sequence[Any]) -> _Ran:
    options = {name: params[name] for name in ("prevent_cse", "policy")}
    ran: _Ran = jax.checkpoint(lambda *args: inner.run(args), **options)(*args)
    return ran


def _cond(inner: _Inner, params: Mapping[str, Any], args: Sequence[Any]) -> _Ran:
    index, *rest = args
    numbers = range(len(inner.blocks))
    nothing: dict[Key, Seen] = {}
    for which in numbers:
        nothing |= inner.nothing(which, rest)

    def branch(which: int, *args: Any) -> _Ran:
        outs, seen = inner.run(args, which=which)
        return outs, nothing | seen

    branches = [lambda *args, which=which: branch(which, *args) for which in numbers]
    ran: _Ran = lax.switch(index, branches, *rest)
    return ran


def _scan(inner: _Inner, params: Mapping[str, Any], args: Sequence[Any]) -> _Ran:
    fixed, carries = scan_lengths(params)
    (body,) = inner.blocks
    consts, carry = args[:fixed], [_array(x) for x in args[fixed:][:carries]]
    xs = [_sliceable(x) for x in args[fixed + carries :]]
    # A scan over layers gives each layer its own part of what is planted for the stack.
    sliced = {
        matmul.key
        for matmul in body.all_matmuls
        if any(loop.at == body.at for loop in matmul.loops)
        and matmul.key in inner.planted
        and inner.planted[matmul.key].lead
    }
    stacked = {key: inner.planted[key].arrays for key in sliced}

    def step(carry: Any, x: Any) -> Any:
        xs, own = x
        planted = dict(inner.planted)
        for key, arrays in own.items():
            planted[key] = Planted(arrays, planted[key].shared, planted[key].lead - 1)
        outs, seen = inner.run([*consts, *carry, *xs], planted)
        return outs[:carries], (outs[carries:], seen)

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    last, (ys, seen) = lax.scan(step, carry, (xs, stacked), **options)
    return [*last, *ys], {
        key: x if key in sliced else Seen(*_over_steps(x)) for key, x in seen.items()
    }


def _over_steps(seen: Seen) -> tuple[Any, Any]:
    """What all steps of a scan saw together."""
    return (
        jax.tree.map(lambda x: jnp.max(x, 0, initial=0), seen.largest),
        jax.tree.map(lambda x: jnp.sum(x, 0), seen.total),
    )


def _sliceable(x: Any) -> Any:
    """What a scan slices along its first axis: codes if each slice has scales of its own.

    Slices of other stored parameters would tear blocks apart or lack a scale: these are arrays.
    """
    if isinstance(x, QArray):
        shares_scale = x.tensor_scale is not None and x.tensor_scale.ndim == 0
        if x.ndim < 2 or x.blocks.lengths[0] != 1 or shares_scale:
            return x.dequantize()
    return x


def _array(x: Any) -> Any:
    return x.array if isinstance(x, _Cast) else x.dequantize() if isinstance(x, QArray) else x


def _while(inner: _Inner, params: Mapping[str, Any], args: Sequence[Any]) -> _Ran:
    first, second = params["cond_nconsts"], params["body_nconsts"]
    of_test, of_step = args[:first], args[first:][:second]
    carry = [_array(x) for x in args[first + second :]]

    def step(state: Any) -> Any:
        carry, seen = state
        outs, own = inner.run([*of_step, *carry], which=1)
        return outs, _merge(dict(seen), own)

    def goes_on(state: Any) -> Any:
        return inner.run([*of_test, *state[0]], which=0)[0][0]

    ran: _Ran = lax.while_loop(goes_on, step, (carry, inner.nothing(1, [*of_step, *carry])))
    return ran


def _shard_map(inner: _Inner, params: Mapping[str, Any], args: Sequence[Any]) -> _Ran:
    names = _manual_axes(params)
    keys = list(inner.planted)

    def body(planted: Any, *args: Any) -> Any:
        outs, seen = inner.run(args, dict(zip(keys, planted, strict=True)))
        # The shards share one state.
        largest = jax.tree.map(
            lambda x: lax.pmax(x, names), {k: x.largest for k, x in seen.items()}
        )
        total = jax.tree.map(lambda x: lax.psum(x, names), {k: x.total for k, x in seen.items()})
        return outs, {key: Seen(largest[key], total[key]) for key in seen}

    everywhere = jax.sharding.PartitionSpec()
    sharded = jax.shard_map(
        body,
        mesh=params["mesh"],
        in_specs=(everywhere, *params["in_specs"]),
        out_specs=(list(params["out_specs"]), everywhere),
        check_vma=params["check_vma"],
        axis_names=set(names),
    )
    ran: _Ran = sharded([inner.planted[key] for key in keys], *map(_array, args))
    return ran


_RULES: dict[str, Callable[[_Inner, Mapping[str, Any], Sequence[Any]], _Ran]] = {
    **dict.fromkeys(_INLINED, _inlined),
    **dict.fromkeys(_REMAT, _remat),
    "cond": _cond,
    "scan": _scan,
    "while": _while,
    "shard_map": _shard_map,
}
