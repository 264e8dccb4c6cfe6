"""Which matmuls of a program are quantized, and which are not."""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qtoolkit.formats.internal import add_json_kinds
from qtoolkit.products._derivative import Cotangent
from qtoolkit.products._matmul import MATMULS, Call, Key, Matmul, Planted, matching
from qtoolkit.products._origins import following_features
from qtoolkit.products._place import MODEL
from qtoolkit.products._plan import State
from qtoolkit.products._product import quantized_product
from qtoolkit.products._program import Program
from qtoolkit.products._quantizing import (
    BY_RECIPE,
    BY_RULE,
    INTEGERS,
    Quantizing,
    Traced,
    stored_labels,
)
from qtoolkit.products._recipe import UNQUANTIZED, Recipe
from qtoolkit.products._states import HISTORY
from qtoolkit.scaling import QArray


@dataclasses.dataclass(frozen=True)
class Product:
    """One matmul or convolution of a program, or several with equal attributes.

    Attributes:
      path: The path of the layer, "blocks/0/mlp"; empty if no layer is known.
      part: "forward", "dgrad" or "wgrad", or "backward" for derivatives of unquantized matmuls.
      operands: The formats to which both operands were rounded; dtypes and shapes for one that
        is not quantized.
      reason: Why it is not quantized; empty if it is.
      where: The line of the program, "model.py:17".
      count: How many there are. One in a loop counts once, and so does one that
        `jax.checkpoint` computes again.
      multiplications: Of numbers, in all of them together; those in `lax.scan` in each iteration.
    """

    path: str
    part: str
    operands: str
    reason: str = ""
    where: str = ""
    count: int = 1
    multiplications: int = 0


add_json_kinds(Product)


@dataclasses.dataclass(frozen=True)
class Report:
    """Every matmul and convolution of a model's forward and backward pass.

    The backward pass is that of a derivative by the parameters of the model: the gradient of an
    input that depends on no parameter is not computed, and not counted.

    Attributes:
      quantized: Those that a recipe rounds.
      left: Those that are not quantized, each with its reason and its line.
      unreached: Paths of layers that have a recipe but ran no matmul.
      lookups: Look-ups whose rows are rounded or stored: "embed/embedding: int4_group32".
      idle: Rules that decided nothing here, because an earlier one did or nothing ran that they
        match, "rule mlp"; and names that `policies.join` was given in vain, "join of q, k, v".
      is_forward_only: Whether matmuls lie in a `lax.while_loop`, of which JAX has no derivative.
      compiled: The `NativeCalls` of the compiled program that was given, or None.
    """

    quantized: tuple[Product, ...]
    left: tuple[Product, ...]
    unreached: tuple[str, ...] = ()
    is_forward_only: bool = False
    lookups: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    compiled: Any = None

    @property
    def unexplained(self) -> tuple[Product, ...]:
        """Those that are not quantized, though neither a rule nor a recipe says so."""
        known = (BY_RULE, BY_RECIPE, INTEGERS)
        return tuple(product for product in self.left if not product.reason.startswith(known))

    def scalars(self) -> dict[str, float]:
        """For a logger: how many matmuls there are, how many are quantized, and what share.

        The names are "matmuls", "quantized" and "share of multiplications".
        """
        done, left = (sum(p.count for p in part) for part in (self.quantized, self.left))
        share = sum(p.multiplications for p in self.quantized) / self._multiplications
        return {
            "matmuls": float(done + left),
            "quantized": float(done),
            "share of multiplications": share,
        }

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("path", *_PARTS, "matmuls", "")]
        by_path: dict[str, list[Product]] = {}
        for product in self.quantized:
            by_path.setdefault(product.path, []).append(product)
        for path, products in by_path.items():
            cells = [_joined(products, part) for part in _PARTS]
            notes = [n for n in (_NO_HISTORY, _NO_STATE) if any(n in cell for cell in cells)]
            note = ", ".join(notes)
            if len(notes) == 1:
                cells = [cell.replace(f": {note}", "") for cell in cells]
            rows.append((path or "-", *cells, str(sum(p.count for p in products)), note))
        lines = text_table(rows)
        if self.left:
            rows = [("not quantized", "part", "operands", "reason", "where", "matmuls", "share")]
            rows += [
                (
                    *(p.path or "-", p.part, p.operands, p.reason, p.where, str(p.count)),
                    f"{p.multiplications / self._multiplications:.1%}",
                )
                for p in self.left
            ]
            lines += ["", *text_table(rows)]
        if self.lookups:
            lines.append(f"looked up: {', '.join(self.lookups)}")
        if self.is_forward_only:
            lines.append("forward only: JAX has no derivative of lax.while_loop")
        if self.idle:
            lines.append(f"decided nothing: {', '.join(self.idle)}")
        if self.unreached:
            lines.append(f"ran no matmul with these inputs: {', '.join(self.unreached)}")
        ran = [] if self.compiled is None else ["", str(self.compiled)]
        return "\n".join([*lines, self._summary(), *ran])

    @property
    def _multiplications(self) -> int:
        return max(1, sum(p.multiplications for p in (*self.quantized, *self.left)))

    def _summary(self) -> str:
        done, left = (sum(p.count for p in part) for part in (self.quantized, self.left))
        text = f"{done} of {done + left} matmuls quantized"
        if done and left:
            share = sum(p.multiplications for p in self.quantized) / self._multiplications
            text += f", {share:.1%} of all multiplications"
        emulated = sum(p.count for p in self.quantized if p.operands.endswith(_EMULATED))
        if emulated:
            text += f"; {emulated} of them emulated, though the recipe says native"
        return text


_PARTS = ("forward", "dgrad", "wgrad")


def _joined(products: list[Product], part: str) -> str:
    return "; ".join(dict.fromkeys(p.operands for p in products if p.part == part)) or "-"


def text_table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


# End the operands of matmuls whose recipe says `arithmetic="native"`.
_NATIVE, _EMULATED = " (native)", " (emulated)"
_UNQUANTIZED = f"{UNQUANTIZED} x {UNQUANTIZED}"
_NO_HISTORY, _NO_STATE = "no history yet", "no state"


def report_of(
    traced: Traced, leaves: list[Any], planted: Mapping[Key, Planted], paths: Iterable[str] = ()
) -> Report:
    """Reports on a function of a model.

    Args:
      planted: The states of its matmuls.
      paths: Those of the layers that have a recipe.
    """
    program, multiply = traced_with_axes(traced, leaves), traced.quantizing()
    native = _native_parts(program, multiply, leaves)
    known = matching(program.matmuls, planted)
    states = {key: planted[state] for key, state in known.items()}
    products = counted(
        product
        for matmul in program.matmuls
        for product in _products(multiply, matmul, states.get(matmul.key, Planted({})), native)
    )
    lookups = [x for x in program.lookups if x.stored or x.operand is not None]
    reached = {product.path for product in products} | {x.parameter.path or MODEL for x in lookups}
    return Report(
        tuple(product for product in products if not product.reason),
        tuple(product for product in products if product.reason),
        tuple(path for path in dict.fromkeys(paths) if path not in reached),
        any(not matmul.has_derivative for matmul in program.matmuls),
        tuple(dict.fromkeys(map(str, lookups))),
        _idle(program, multiply),
    )


def _idle(program: Program, multiply: Quantizing) -> tuple[str, ...]:
    """The rules and the joins that decide nothing, see `Report.idle`."""
    decide, names = multiply.deciding_rules(program), dict[str, None]()
    own = (module.rules for module in multiply.modules.values() if module.rules is not None)
    for rules in dict.fromkeys((multiply.rules, *own)):
        for place, (key, _) in enumerate(rules.rules):
            if (rules, place) not in decide:
                names[f"rule {key if isinstance(key, str) else key.__name__}"] = None
    joined, used = dict[tuple[str, ...], None](), set[tuple[str, ...]]()
    for matmul in program.matmuls:
        recipe, kernel = multiply.recipe_of(matmul), matmul.parameter
        if kernel is not None and recipe is not None and recipe.forward[1] is not None:
            groups = recipe.forward[1].joined
            joined |= dict.fromkeys(groups)
            used |= {group for group in groups if {*group} & {*kernel.full_path.split("/")}}
    idle = (f"join of {', '.join(group)}" for group in joined if group not in used)
    return (*names, *idle)


def traced_with_axes(
    traced: Traced, leaves: list[Any], axes: tuple[tuple[str, int], ...] = ()
) -> Program:
    """The program, in an axis of size 1 for each axis name that the function asks for.

    `nnx.BatchNorm(axis_name="batch")` asks for one, and so does a recipe with `axis_names`.
    """
    try:
        return traced.program(leaves, axes)
    except (NameError, ValueError) as error:
        unbound = re.search(r"unbound axis name: (.+?)(?:\. |\)|$)", str(error), re.M)
        if unbound is None or unbound[1] in dict(axes):
            raise
    return traced_with_axes(traced, leaves, (*axes, (unbound[1], 1)))


def left_of(program: Program, multiply: Quantizing) -> tuple[Product, ...]:
    """The matmuls of a forward pass that are not quantized."""
    products = (x for matmul in program.matmuls for x in _products(multiply, matmul, None, {}))
    return tuple(counted(x for x in products if x.reason and x.part == "forward"))


def counted(products: Iterable[Product]) -> tuple[Product, ...]:
    """Each product once, with the count and the multiplications of all that are equal to it."""
    counts: dict[Product, tuple[int, int]] = {}
    for product in products:
        name = dataclasses.replace(product, multiplications=0)
        count, multiplications = counts.get(name, (0, 0))
        counts[name] = count + 1, multiplications + product.multiplications
    return tuple(
        dataclasses.replace(product, count=count, multiplications=multiplications)
        for product, (count, multiplications) in counts.items()
    )


def _products(
    multiply: Quantizing,
    matmul: Matmul,
    planted: Planted | None,
    native: Mapping[Key, "_Native"],
) -> Iterator[Product]:
    """The forward matmul, and those of its derivative by the parameters of the model."""
    recipe, number = multiply.recipe_of(matmul), matmul.times * matmul.multiplications
    sides = [side for side in (0, 1) if matmul.origins[side].is_trained and matmul.has_derivative]
    if recipe is None:
        reason = multiply.reason_of(matmul)
        lhs, rhs, out = (f"{x.dtype}{list(x.shape)}" for x in (*matmul.types[:2], matmul.result))
        part = "backward" if matmul.is_derivative else "forward"
        path = "" if matmul.module is None else matmul.path or MODEL
        this = Product(path, part, f"{lhs} x {rhs}", reason, matmul.where, multiplications=number)
        yield this
        for side in () if matmul.is_derivative else sides:
            operands = f"{lhs} x {out}" if side else f"{out} x {rhs}"
            yield dataclasses.replace(this, part="backward", operands=operands)
        return
    stored = stored_labels(matmul)
    recipe = recipe.with_stored(1) if any(stored) else recipe
    if matmul.kernel == 0:  # reports name lhs first, recipes the input
        recipe, stored = recipe.swapped(), stored[::-1]
    is_native = native.get(matmul.key, _Native())
    parts = [("forward", recipe.forward, stored, is_native.forward)]
    pairs = ("dgrad", recipe.dgrad, ("", stored[1])), ("wgrad", recipe.wgrad, (stored[0], ""))
    parts += [(*pairs[side], is_native.gradients[side]) for side in sides]
    for part, pair, labels, runs_natively in parts:
        shown = (
            given or (UNQUANTIZED if operand is None else str(operand))
            for operand, given in zip(pair, labels, strict=True)
        )
        label = " x ".join(shown)
        reason = BY_RECIPE if label == _UNQUANTIZED else ""
        if recipe.arithmetic == "native" and not reason:
            label += _NATIVE if runs_natively else _EMULATED
        if planted is not None and HISTORY not in planted.arrays:
            label = label.replace(", delayed", f", current: {_NO_STATE}")
        elif planted is not None and _lacks_history(planted.arrays):
            label = label.replace(", delayed", f", current: {_NO_HISTORY}")
        yield Product(matmul.path or MODEL, part, label, reason, multiplications=number)


def _lacks_history(arrays: Mapping[str, Any]) -> bool:
    """Whether no step has given a matmul with delayed scales a history yet."""
    x = arrays[HISTORY]
    return (
        isinstance(x, jax.Array)
        and not isinstance(x, jax.core.Tracer)
        and x.is_fully_addressable
        and not np.any(x)
    )


class _Native(NamedTuple):
    """Which of the three matmuls multiply arrays of 8 bits or less."""

    forward: bool = False
    gradients: tuple[bool, bool] = (False, False)


def _native_parts(program: Program, multiply: Quantizing, leaves: list[Any]) -> dict[Key, _Native]:
    """Of the matmuls whose recipes ask for it, found by tracing each with its gradients."""
    found: dict[Key, _Native] = {}

    def look(matmul: Matmul, call: Call, planted: Any) -> tuple[Any, None]:
        recipe = multiply.recipe_of(matmul)
        if recipe is not None and recipe.arithmetic == "native":
            found[matmul.key] = _native_of(matmul, call, recipe)
        return None, None

    recipes = map(multiply.recipe_of, program.matmuls)
    if any(recipe is not None and recipe.arithmetic == "native" for recipe in recipes):
        jax.eval_shape(lambda leaves: program.run(leaves, look, {})[0], leaves)
    return found


def _native_of(matmul: Matmul, call: Call, recipe: Recipe) -> _Native:
    operands = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (call.lhs, call.rhs, *call.extra)
    )
    recipe, function = following_features(recipe.without_state(), matmul.operands), matmul.function
    assert function is not None
    axes = [(name, 1) for name in recipe.axis_names]
    is_swapped = matmul.kernel == 0

    def forward(lhs: Any, rhs: Any, *extra: Any) -> Any:
        state = State(jnp.ones(3)) if recipe.is_calibrated else State()
        return quantized_product(
            "report",
            function,
            lhs,
            rhs,
            recipe,
            matmul.result.dtype,
            state,
            extra,
            is_swapped=is_swapped,
        )

    ahead = jax.make_jaxpr(forward, axis_env=axes)(*operands)
    is_forward = all(_is_native(eqn) for eqn in _equations(ahead.jaxpr) if _is_matmul(eqn))
    sides = tuple(i for i in (0, 1) if not isinstance(operands[i], QArray))
    gradient = jax.grad(lambda *xs: forward(*xs).astype(jnp.float32).sum(), argnums=sides)
    back = jax.make_jaxpr(gradient, axis_env=axes)(*operands)
    natives = [False, False]
    for eqn in filter(_is_gradient, _equations(back.jaxpr)):
        for side, is_native in zip(sides, _native_gradients(eqn, axes), strict=True):
            natives[side] = is_native
    return _Native(is_forward, (natives[0], natives[1]))


def _native_gradients(eqn: Any, axes: Any) -> list[bool]:
    """Of the matmuls in an equation that computes gradients."""
    function, first = eqn.params["forward"], eqn.params["residuals"]
    closed = jax.make_jaxpr(lambda *xs: function(xs[:first], xs[first:]), axis_env=axes)(
        *(jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in eqn.invars)
    )
    return [_is_native(inner) for inner in _equations(closed.jaxpr) if _is_matmul(inner)]


def _is_gradient(eqn: Any) -> bool:
    if eqn.primitive.name != "linear_with_transpose":
        return False
    function = eqn.params["forward"]
    while hasattr(function, "function"):
        function = function.function
    return isinstance(function, Cotangent)


_SCALED = "scaled_dot"


def _is_matmul(eqn: Any) -> bool:
    return eqn.primitive.name in (*MATMULS, _SCALED)


def _is_native(eqn: Any) -> bool:
    widths = [x.aval.dtype.itemsize for x in eqn.invars[:2]]
    return eqn.primitive.name == _SCALED or max(widths) == 1


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for item in value if isinstance(value, list | tuple) else [value]:
                inner = getattr(item, "jaxpr", item)
                if hasattr(inner, "eqns"):
                    yield from _equations(inner)


def strict_inputs(
    strict: Any, argument: str = "strict", where: str = "wrap"
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and the keyword inputs that `wrap(strict=)` or `wrap(inputs=)` was given."""
    if isinstance(strict, Mapping):
        return (), dict(strict)
    if isinstance(strict, tuple | list):
        return tuple(strict), {}
    if hasattr(strict, "dtype"):
        return (strict,), {}
    raise TypeError(
        f"{where}: {argument} has type {type(strict).__name__}, expected inputs to trace the model "
        f"with; write {argument}=(x,), or {argument}={{'x': x}} for keywords"
    )


def check_all_quantized(name: str, found: Report) -> None:
    """For `wrap(strict=)`: raises if no matmul is quantized, or one is not without a rule."""
    if not found.quantized:
        raise ValueError(f"wrap: no matmul of {name} is quantized with these inputs:\n{found}")
    if found.unexplained:
        first = found.unexplained[0]
        raise ValueError(
            f"wrap: {len(found.unexplained)} matmuls of {name} are not quantized, and no rule "
            f"excludes them, first {first.operands} at {first.where or 'an unknown line'}; name "
            f"them in a rule with None, or use qtoolkit.dot_general there\n{found}"
        )
