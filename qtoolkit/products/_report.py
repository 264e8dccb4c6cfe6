"""Which matmuls of a program are quantized, and which are not: read from its jaxpr."""

import collections
import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from qtoolkit.formats.internal import add_json_kinds
from qtoolkit.products._control_flow import MATMULS, QUANTIZED_MATMUL, SCALED, jaxprs_in
from qtoolkit.products._derivative import Cotangent
from qtoolkit.products._instruments import Quantized, has_no_derivative, instrumented
from qtoolkit.products._lines import librarys_line, users_line
from qtoolkit.products._multiplications import (
    is_native,
    multiplications_of,
    multiplications_of_gradient,
    native_gradients,
    runs_of,
)
from qtoolkit.products._operand import Learned
from qtoolkit.products._place import Mark, marks_of
from qtoolkit.products._recipe import UNQUANTIZED
from qtoolkit.products._stored import STORED
from qtoolkit.scaling import QArray


@dataclasses.dataclass(frozen=True)
class Product:
    """One matmul or convolution of a program, or several with equal attributes.

    Attributes:
      path: The path of the layer, "blocks/0/mlp"; empty if no layer is known.
      part: "forward", "dgrad", "wgrad", or "backward" for derivatives of unquantized matmuls.
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

    Attributes:
      quantized: Those that a recipe rounds.
      left: Those that are not quantized, each with its reason and its line.
      unreached: Paths of layers that have a recipe but ran no matmul.
      is_forward_only: Whether the backward pass is missing because JAX cannot differentiate a
        `lax.while_loop` in the model.
      compiled: The `NativeCalls` of the compiled program that was given, or None.
    """

    quantized: tuple[Product, ...]
    left: tuple[Product, ...]
    unreached: tuple[str, ...] = ()
    is_forward_only: bool = False
    compiled: Any = None

    @property
    def unexplained(self) -> tuple[Product, ...]:
        """Those that are not quantized, though neither a rule nor a recipe says so."""
        known = (BY_RULE, BY_RECIPE, INTEGERS)
        return tuple(product for product in self.left if not product.reason.startswith(known))

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("path", *_PARTS, "matmuls", "")]
        by_path: dict[str, list[Product]] = {}
        for product in self.quantized:
            by_path.setdefault(product.path, []).append(product)
        for path, products in by_path.items():
            cells = [_joined(products, part) for part in _PARTS]
            note = _NO_HISTORY if any(_NO_HISTORY in cell for cell in cells) else ""
            cells = [cell.replace(f": {note}", "") if note else cell for cell in cells]
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
        if self.is_forward_only:
            lines.append("forward only: JAX has no derivative of lax.while_loop")
        if self.unreached:
            lines.append(f"not reached by these inputs: {', '.join(self.unreached)}")
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


BY_RULE, BY_RECIPE = "excluded by a rule", "unquantized by the recipe"
INTEGERS = "integers are not rounded"
# End the operands of matmuls whose recipe says `arithmetic="native"`.
_NATIVE, _EMULATED = " (native)", " (emulated)"
_UNQUANTIZED = f"{UNQUANTIZED} x {UNQUANTIZED}"
_NO_HISTORY = "no history yet"
_GIVEN = (f", {STORED}", f", {Learned.__name__.lower()}")


def report_of(
    function: Callable[..., Any],
    arguments: Any,
    paths: tuple[str, ...] = (),
    unstarted: Collection[str] = (),
) -> Report:
    """Reports on a pure function of pytrees and its derivatives by all floats in its arguments.

    Args:
      paths: The paths of the layers that have a recipe.
      unstarted: The paths of those whose histories are empty, see `lacks_history`.
    """
    forward, axes = _traced(function, arguments)
    # A QArray counts as one leaf, so its float scales are not differentiated by.
    leaves, structure = jax.tree.flatten(arguments, is_leaf=lambda x: isinstance(x, QArray))
    places = [i for i, leaf in enumerate(leaves) if _is_float(leaf)]

    def total(floats: list[Any]) -> Any:
        merged = list(leaves)
        for place, value in zip(places, floats, strict=True):
            merged[place] = value
        outs = jax.tree.leaves(function(*jax.tree.unflatten(structure, merged)))
        parts = [jnp.real(out) for out in outs if jnp.issubdtype(out.dtype, jnp.inexact)]
        return sum((jnp.sum(part.astype(jnp.float32)) for part in parts), 0.0)

    found = list(_products(forward.jaxpr, "forward"))
    is_forward_only = False
    if places:
        floats = [leaves[place] for place in places]
        try:
            backward, _ = _traced(jax.grad(total), (floats,), axes)
            found += _without(list(_products(backward.jaxpr, "backward")), found)
        except ValueError as error:
            is_forward_only = has_no_derivative(error)
            if not is_forward_only:
                raise
    products = _counted(_as_of_now(product, unstarted) for product in found)
    quantized = tuple(product for product in products if not product.reason)
    left = tuple(product for product in products if product.reason)
    reached = {product.path for product in products}
    unreached = tuple(path for path in paths if path not in reached)
    return Report(quantized, left, unreached, is_forward_only)


def lacks_history(histories: Iterable[Any]) -> bool:
    """Whether a layer has delayed scales, and no step has given it a history yet."""
    known = list(histories)
    return bool(known) and all(
        isinstance(x, jax.Array)
        and not isinstance(x, jax.core.Tracer)
        and x.is_fully_addressable
        and not np.any(x)
        for x in known
    )


def _as_of_now(product: Product, unstarted: Collection[str]) -> Product:
    if product.path not in unstarted:
        return product
    now = product.operands.replace(", delayed", f", current: {_NO_HISTORY}")
    return dataclasses.replace(product, operands=now)


_Axes = tuple[tuple[str, int], ...]


def _traced(
    function: Callable[..., Any], arguments: Any, axes: _Axes = ()
) -> tuple[ClosedJaxpr, _Axes]:
    """The jaxpr of a function, in an axis of size 1 for each axis name that it asks for.

    `nnx.BatchNorm(axis_name="batch")` asks for one, and so does a recipe with `axis_names`.
    """
    try:
        with instrumented(Quantized()):
            return jax.make_jaxpr(function, axis_env=axes)(*arguments), axes
    except (NameError, ValueError) as error:
        unbound = re.search(r"unbound axis name: (.+?)(?:\. |\)|$)", str(error), re.M)
        if unbound is None or unbound[1] in dict(axes):
            raise
    return _traced(function, arguments, (*axes, (unbound[1], 1)))


def _counted(products: Iterable[Product]) -> tuple[Product, ...]:
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


def _is_float(x: Any) -> bool:
    is_array = hasattr(x, "dtype") and not isinstance(x, QArray)
    return is_array and jnp.issubdtype(x.dtype, jnp.floating)


def _without(both: list[Product], forward: list[Product]) -> list[Product]:
    """The matmuls of a forward and backward pass without those of the forward pass.

    They are matched by path and operands, not by lines: when JAX differentiates a custom_vjp, it
    traces its `fwd` in place of the function itself, and `fwd` computes the same at another line.
    """
    remaining = collections.Counter((p.path, p.operands) for p in forward)
    kept = []
    for product in sorted(both, key=lambda p: p.part != "forward"):
        name = product.path, product.operands
        if product.part in ("backward", "forward") and remaining[name] > 0:
            remaining[name] -= 1
        elif product.part != "forward":
            kept.append(product)
        elif product.reason:  # not in the forward pass: from the rule of a custom_jvp, for example
            kept.append(dataclasses.replace(product, part="backward"))
    return kept


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
            f"them in a rule with None, or use qtoolkit.dot there\n{found}"
        )


def left_of(closed: ClosedJaxpr) -> tuple[Product, ...]:
    """The matmuls of a forward pass that are not quantized."""
    return _counted(p for p in _products(closed.jaxpr, "forward") if p.reason)


def _products(
    jaxpr: Any,
    part: str,
    stack: str = "",
    mark: Mark | None = None,
    is_quantized: bool = False,
    around: str = "",
    line: str = "",
    times: int = 1,
) -> Iterator[Product]:
    """The matmuls of a jaxpr, but for those of empty arrays and those that are computed again.

    Args:
      part: The part to which its unquantized matmuls belong: "forward" or "backward".
      stack: The name stack around the jaxpr, in which JAX says what it has derived.
      mark: The mark of the equation in which it lies, or None.
      is_quantized: Whether it lies in a quantized matmul.
      around: The entry of `_OPAQUE` inside of which it lies, or "".
      line: The line of the user's program that made the equation in which it lies, or "".
      times: How often it runs.
    """
    marks = marks_of(jaxpr)
    for eqn in jaxpr.eqns:
        here = f"{stack}/{eqn.source_info.name_stack}"
        name = eqn.primitive.name
        own = next((marks[var] for var in eqn.outvars if var in marks), mark)
        if name == "linear_with_transpose":
            yield from _derivatives(eqn, own, times)
        elif name in (*MATMULS, SCALED):
            number = times * multiplications_of(eqn)
            # `lax.associative_scan` makes matmuls of empty arrays.
            if not number or _RECOMPUTED in here:
                continue
            if is_quantized:
                found = _quantized(eqn, own)
            else:
                part_here = part if "transpose(" in here else "forward"
                where = users_line(eqn) or line or librarys_line(eqn)
                found = _left(eqn, own, part_here, around, where)
            yield dataclasses.replace(found, multiplications=number)
        else:
            inside = is_quantized or eqn.params.get("name") == QUANTIZED_MATMUL
            outer = _OPAQUE.get(name, around)
            # JAX keeps some twenty frames of a traceback, and `jnp.linalg.solve` and others use all
            # of them: there the line of an equation around it says where the user called it.
            outer_line = users_line(eqn) or line
            again = times * runs_of(eqn)
            for inner in jaxprs_in(eqn.params):
                yield from _products(inner, part, here, own, inside, outer, outer_line, again)


def _quantized(eqn: Any, mark: Mark | None) -> Product:
    """A forward matmul with rounded operands; without a mark, one of `qtoolkit.dot_general`."""
    if mark is None or mark.recipe is None:
        return Product("", "forward", "")
    label = " x ".join(mark.labels)
    reason = BY_RECIPE if label == _UNQUANTIZED else ""
    if mark.recipe.arithmetic == "native" and not reason:
        label += _NATIVE if is_native(eqn) else _EMULATED
    return Product(mark.path, "forward", label, reason)


# In the name stack of what `jax.checkpoint` computes again in the backward pass.
_RECOMPUTED = "rematted_computation"
# Primitives inside of which no matmuls are replaced: the user has defined derivatives for exactly
# the function that is there.
_OPAQUE = {
    "custom_vjp_call": "custom_vjp",
    "custom_vjp_call_jaxpr": "custom_vjp",
    "custom_jvp_call": "custom_jvp",
}


def _derivatives(eqn: Any, mark: Mark | None, times: int) -> Iterator[Product]:
    """The matmuls dgrad and wgrad in the equation that computes both.

    The parameter `forward` of the equation is a `Cotangent`; its plan says how operands are
    rounded.
    """
    function = eqn.params["forward"]
    while hasattr(function, "function"):
        function = function.function
    if not isinstance(function, Cotangent):  # a tangent, or rounding alone
        return
    number = times * multiplications_of_gradient(eqn, function.product)
    if not number:
        return
    recipe = function.product.plan.recipe
    is_asked = recipe.arithmetic == "native"
    native = native_gradients(eqn, recipe.axis_names) if is_asked else []
    forward = [] if mark is None else list(mark.labels)
    for index, side in enumerate(function.product.sides):
        pair = recipe.wgrad if side else recipe.dgrad
        part = "wgrad" if side else "dgrad"
        labels = [UNQUANTIZED if operand is None else str(operand) for operand in pair]
        # Stored and learned operands are rounded before the matmul, so its recipe has None for
        # them. The derivatives use the same arrays: take the label from the forward one.
        other = 1 - side
        if pair[other] is None and forward[other:] and forward[other].endswith(_GIVEN):
            labels[other] = forward[other]
        label = " x ".join(labels)
        reason = BY_RECIPE if label == _UNQUANTIZED else ""
        if is_asked and not reason:
            label += _NATIVE if native[index] else _EMULATED
        path = "" if mark is None else mark.path
        yield Product(path, part, label, reason, multiplications=number)


def _left(eqn: Any, mark: Mark | None, part: str, around: str, where: str) -> Product:
    shapes = " x ".join(f"{x.aval.dtype}{list(x.aval.shape)}" for x in eqn.invars[:2])
    dtypes = [x.aval.dtype for x in eqn.invars[:2]]
    if mark is not None and mark.is_excluded:
        reason = BY_RULE
    elif any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in dtypes):
        reason = "complex numbers are not rounded: multiply real and imaginary parts"
    elif not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        reason = INTEGERS
    elif around:
        reason = f"inside of {around}: call qtoolkit.dot_general there, with a recipe"
    elif part == "backward":
        reason = "derivative of an unquantized matmul, or of a custom_vjp"
    else:
        reason = "computed by itself, in no wrapped layer"
    path = "" if mark is None else mark.path
    return Product(path, part, shapes, reason, where)
