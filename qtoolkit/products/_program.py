"""A function of arrays, traced once, and run with its matmuls computed otherwise.

    program = Program.of(function, inputs, parameters)        # one trace, no numbers
    program.matmuls                                           # what a report prints
    outs, seen = program.run(inputs, multiply, planted)       # numbers

`multiply(matmul, call, planted)` computes one matmul. It returns the result, or None for the matmul
as the user wrote it; and what it has seen, a `Seen`. What is planted for a matmul (scales, keys,
probes) and what is seen of it go by the matmul's key. Both pass through all loops: what is planted
is an operand of the body, what is seen is one more result of it. `_Finder` finds the matmuls,
once; `_run` runs them. How each loop of JAX is walked is said in `_loops`.

A matmul belongs to the module that owns its kernel, whichever module computes it. A matmul of two
activations belongs to the module that runs, which says so by a name scope (`_calls`).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Literal

from qtoolkit.products._lines import librarys_line, users_line
from qtoolkit.products._lookups import Lookup, looked_up, lookup_of
from qtoolkit.products._loops import (
    OPAQUE,
    RULES,
    Block,
    Cast,
    Find,
    Inner,
    array_of,
    bodies_of,
    has_bodies,
    is_opaque,
    merge,
    runs_of,
)
from qtoolkit.products._matmul import (
    Call,
    Key,
    Matmul,
    Multiply,
    Planted,
    function_of,
    is_matmul,
    multiplications_of,
    names_of,
)
from qtoolkit.products._origins import CONSTANT, Origin, Parameter, Step, original_of, origins_after
from qtoolkit.products._recipe import Recipe
from qtoolkit.products._sites import Site, site_of
from qtoolkit.products._taps import Seen
from qtoolkit.scaling import QArray


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced function of arrays.

    Attributes:
      static: What the function returned besides arrays.
      other_uses: The parameters that something else than a matmul or look-up uses, too, or that the
        function returns.
      parameters: For each input its name if it is a parameter.
      returned: The numbers of results that are a stored parameter, and that of the input.
    """

    block: Block
    static: Any
    other_uses: frozenset[Parameter]
    parameters: tuple[Parameter | None, ...]
    returned: Mapping[int, int]

    @classmethod
    def of(
        cls,
        function: Callable[[list[Any]], tuple[Any, Any]],
        inputs: Sequence[Any],
        parameters: Sequence[Parameter | None],
        axes: Sequence[tuple[str, int]] = (),
        recipe_of_rows: Callable[[Lookup], Recipe | None] = lambda _: None,
    ) -> "Program":
        """Traces a function of a list of arrays, which returns a pytree of arrays and static data.

        Args:
          inputs: A `QArray` among them is a float array for the function; a matmul gets it.
          parameters: For each input its name if it is a parameter, else None.
          axes: Names and sizes of axes that the function may ask for.
          recipe_of_rows: Says by which recipe a look-up rounds the rows.
        """
        static: list[Any] = []

        def traced(inputs: list[Any]) -> Any:
            arrays, other = function(inputs)
            static.append(other)
            return arrays

        seen_as = [_as_float(x) for x in inputs]
        closed = jax.make_jaxpr(traced, axis_env=list(axes))(seen_as)
        finder = _Finder(recipe_of_rows)
        pairs = zip(parameters, inputs, strict=True)
        block, outs = finder.block(closed, [Origin.of(*pair) for pair in pairs])
        block = _renamed(block, iter(names_of(block.all_matmuls)))
        # What is only written back, as `nnx.jit` does with all that it is given, is no use.
        to_user = (outs[number] for number in getattr(static[-1], "returned", range(len(outs))))
        used = {x.parameter for x in to_user if x.order is not None and x.parameter is not None}
        returned = {
            number: parameters.index(x.parameter)
            for number, (x, out) in enumerate(zip(outs, closed.out_avals, strict=True))
            if x.stored and x.order == () and not x.loops
            if out.dtype == seen_as[parameters.index(x.parameter)].dtype
        }
        other_uses = frozenset(finder.other_uses | used)
        return cls(block, static[-1], other_uses, tuple(parameters), returned)

    @property
    def matmuls(self) -> list[Matmul]:
        return self.block.all_matmuls

    @property
    def is_as_written(self) -> bool:
        """Whether there is nothing in it to compute otherwise than the user wrote it."""
        return not self.matmuls and all(x.recipe is None and not x.stored for x in self.lookups)

    @property
    def lookups(self) -> list[Lookup]:
        return self.block.all_lookups

    @property
    def paths_of_kernels(self) -> list[str]:
        """The paths of the modules whose kernels run, in their order."""
        return list(dict.fromkeys(x.path for x in self.matmuls if x.parameter is not None))

    def codes(self, inputs: Sequence[Any]) -> dict[int, QArray]:
        """Of results that are a stored parameter as it came in: that, by the result's number."""
        return {number: inputs[place] for number, place in self.returned.items()}

    def run(
        self, inputs: Sequence[Any], multiply: Multiply, planted: Mapping[Key, Planted]
    ) -> tuple[list[Any], dict[Key, Seen]]:
        """The results of the function, flat, and what was seen of each matmul."""
        return _run(self.block, [_everywhere(x) for x in inputs], multiply, planted)


def _as_float(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, QArray) else x


def _everywhere(x: Any) -> Any:
    """An input as it was traced. On Explicit meshes devices gather the codes of a stored one."""
    if not isinstance(x, QArray):
        return x
    is_cut = any(any(jax.typeof(part).sharding.spec) for part in jax.tree.leaves(x))
    replicated = jax.sharding.PartitionSpec()
    return jax.tree.map(lambda part: jax.sharding.reshard(part, replicated), x) if is_cut else x


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
    body: str | None = None  # the name of the jitted function, "" in other bodies
    site: Site = Site("", "", False)  # of the equation whose body it is

    def site_of(self, eqn: Any) -> Site:
        return site_of(eqn, self.body).within(self.site)

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
        name = eqn.primitive.name
        return self._replace(
            times=self.times * runs_of(eqn),
            opaque=OPAQUE.get(name, name) if is_opaque(eqn) else self.opaque,
            has_derivative=self.has_derivative and name != "while",
            line=users_line(eqn) or self.line,
            body=str(eqn.params["name"]) if name in ("jit", "pjit") else "",
            site=self.site_of(eqn),
        )


class _Finder:
    """Finds the matmuls of a jaxpr, with what is known of their operands.

    Attributes:
      other_uses: See `Program`.
    """

    def __init__(self, recipe_of_rows: Callable[[Lookup], Recipe | None] = lambda _: None) -> None:
        self.other_uses: set[Parameter] = set()
        self.recipe_of_rows = recipe_of_rows

    def block(
        self,
        closed: ClosedJaxpr,
        origins: Sequence[Origin],
        at: tuple[int, ...] = (),
        around: "_Around | None" = None,
    ) -> tuple[Block, list[Origin]]:
        """A jaxpr whose inputs come from `origins`, and the origins of its results."""
        jaxpr, around = closed.jaxpr, around or _Around()
        known: dict[Any, Origin] = dict(zip(jaxpr.invars, origins, strict=True))
        known.update(dict.fromkeys(jaxpr.constvars, CONSTANT))

        def of(x: Any) -> Origin:
            return CONSTANT if isinstance(x, Literal) else known[x]

        matmuls: dict[int, Matmul] = {}
        bodies: dict[int, tuple[Block, ...]] = {}
        casts: set[int] = set()
        lookups: dict[int, Lookup] = {}
        for number, eqn in enumerate(jaxpr.eqns):
            inputs, here = [of(x) for x in eqn.invars], around.within(eqn)
            if is_matmul(eqn):
                matmuls[number] = self._matmul(eqn, inputs, here)
                results = [_result_of(matmuls[number])]
            elif has_bodies(eqn):
                inner = here.inside(eqn)
                find: Find = functools.partial(self._block_in, inner)
                blocks, results = bodies_of(eqn, inputs, find, _Finder().block, (*at, number))
                if is_opaque(eqn):
                    self._note_uses(inputs, [])
                if any(block.matmuls or block.bodies or block.lookups for block in blocks):
                    bodies[number] = tuple(blocks)
            else:
                step = Step.of(eqn)
                results = origins_after(step, inputs)
                lookup = lookup_of(eqn, inputs[0]) if inputs and not around.opaque else None
                if lookup is not None:
                    lookups[number] = lookup._replace(recipe=self.recipe_of_rows(lookup))
                else:
                    self._note_uses(inputs, results)
                if step.is_cast_to_half and results[0].parameter is not None:
                    casts.add(number)
            known.update(zip(eqn.outvars, results, strict=True))
        block = Block(jaxpr, closed.consts, at, matmuls, bodies, frozenset(casts), lookups)
        return block, [of(x) for x in jaxpr.outvars]

    def _block_in(
        self, around: "_Around", closed: ClosedJaxpr, origins: Any, at: tuple[int, ...]
    ) -> tuple[Block, list[Origin]]:
        return self.block(closed, origins, at, around)

    def _note_uses(self, inputs: Sequence[Origin], results: Sequence[Origin]) -> None:
        """Notes the parameters that an operation uses, unless it only transposes or casts one."""
        if not results or results[0].order is None:
            used = (x.parameter for x in inputs if x.order is not None)
            self.other_uses.update(x for x in used if x is not None)

    def _matmul(self, eqn: Any, inputs: Sequence[Origin], around: _Around) -> Matmul:
        parameters = [x.parameter for x in inputs[:2]]
        sides = [side for side in (1, 0) if parameters[side] is not None]
        # Of two parameters the kernel is the one that was only transposed: the other may be rows of
        # an embedding that tokens select which the function closes over.
        plain = (side for side in sides if inputs[side].order is not None)
        kernel = next(plain, sides[0] if sides else None)
        for side, x in enumerate(inputs[:2]):  # a product of two parameters is no matmul of a layer
            if x.parameter is not None and parameters[1 - side] is not None:
                self.other_uses.add(x.parameter)
        parameter = None if kernel is None else parameters[kernel]
        site = around.site_of(eqn)
        return Matmul(
            primitive=eqn.primitive.name,
            path=(around.module or "") if parameter is None else parameter.path,
            name="" if parameter is None else parameter.name,
            place=site.in_module if parameter is None else site.in_call,
            parameter=parameter,
            kernel=kernel,
            module=around.module,
            call=around.call,
            function=function_of(eqn),
            types=tuple(x.aval for x in eqn.invars),
            origins=(inputs[0], inputs[1]),
            result=eqn.outvars[0].aval,
            times=around.times,
            around=around.opaque,
            is_derivative=around.is_derivative,
            has_derivative=around.has_derivative,
            where=users_line(eqn) or around.line or librarys_line(eqn),
            multiplications=multiplications_of(eqn),
        )


def _renamed(block: Block, names: Iterator[str]) -> Block:
    """A block with other names of its matmuls, in the order of `all_matmuls`."""
    matmuls, bodies = dict(block.matmuls), dict(block.bodies)
    for number in sorted({*matmuls, *bodies}):
        if number in matmuls:
            matmuls[number] = matmuls[number]._replace(name=next(names))
        if number in bodies:
            bodies[number] = tuple(_renamed(inner, names) for inner in bodies[number])
    return block._replace(matmuls=matmuls, bodies=bodies)


def _result_of(matmul: Matmul) -> Origin:
    """What is known of the result of a matmul."""
    if all(x.is_constant for x in matmul.origins):
        return CONSTANT
    is_trained = any(x.is_trained for x in matmul.origins)
    if matmul.function is None:
        return Origin(is_trained=is_trained and jnp.issubdtype(matmul.result.dtype, jnp.inexact))
    return Origin(is_trained=is_trained, features=matmul.operands.features_of_result)


def _run(
    block: Block, args: Sequence[Any], multiply: Multiply, planted: Mapping[Key, Planted]
) -> tuple[list[Any], dict[Key, Seen]]:
    """Runs a jaxpr. Its arguments may be `QArray`s and `Cast`s.

    A value of it is an array, or a `Cast`: an array that was cast from another, or is stored.
    """
    jaxpr, seen = block.jaxpr, dict[Key, Seen]()
    values = dict(zip(jaxpr.constvars, block.consts, strict=True))
    for variable, x in zip(jaxpr.invars, args, strict=True):
        values[variable] = Cast(array_of(x), x) if isinstance(x, QArray) else x

    def read(x: Any) -> Any:
        return x.val if isinstance(x, Literal) else values[x]

    for number, eqn in enumerate(jaxpr.eqns):
        given = [read(x) for x in eqn.invars]
        inputs = [array_of(x) for x in given]
        operands = [x.original if isinstance(x, Cast) else x for x in given]
        bind = lambda x: _bound(eqn, [x, *inputs[1:]])[0]  # noqa: B023, E731
        info = eqn.source_info
        stack = source_info_util.current_name_stack() + info.name_stack
        with source_info_util.user_context(info.traceback, name_stack=stack), eqn.ctx.manager:
            if number in block.matmuls:
                matmul = block.matmuls[number]
                plain: Any = _Plain(eqn, inputs)
                call = Call(operands[0], operands[1], (*inputs[2:],), plain)
                out, own = multiply(matmul, call, planted.get(matmul.key))
                outs = [plain() if out is None else out]
                if own is not None:
                    merge(seen, {matmul.key: own})
            elif number in block.lookups:
                outs = [looked_up(block.lookups[number], eqn, operands[0], inputs, bind)]
            elif number in block.bodies and not is_opaque(eqn):
                inner = Inner(_run, block.bodies[number], multiply, planted)
                pairs = zip(given, operands, strict=True)
                whole = [y if isinstance(y, QArray) else x for x, y in pairs]
                outs, own_seen = RULES[eqn.primitive.name](inner, eqn.params, whole)
                merge(seen, own_seen)
            else:
                outs = _bound(eqn, inputs)
                before = given[0].original if given and isinstance(given[0], Cast) else None
                if len(outs) == 1 and (before is not None or number in block.casts):
                    original = original_of(Step.of(eqn), bind, inputs[0], before)
                    outs = outs if original is None else [Cast(outs[0], original)]
        values.update(zip(eqn.outvars, outs, strict=True))
    return [array_of(read(x)) for x in jaxpr.outvars], seen


class _Plain(NamedTuple):
    """A matmul as the user wrote it."""

    eqn: Any
    inputs: Sequence[Any]

    def __call__(self) -> Any:
        return _bound(self.eqn, self.inputs)[0]


def _bound(eqn: Any, values: Sequence[Any]) -> list[Any]:
    out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]
