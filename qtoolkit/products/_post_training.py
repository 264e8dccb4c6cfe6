"""GPTQ, AWQ and SmoothQuant for the kernels of a model, whichever Flax package it is from."""

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qtoolkit.casts.internal import WIDTHS, exact_float32
from qtoolkit.formats import BlockFormat
from qtoolkit.products._bilinear import Axes
from qtoolkit.products._inputs import Batch
from qtoolkit.products._operand import Current, Operand
from qtoolkit.products._rounded import rounding_of
from qtoolkit.products._tracking import Key, Node, Root, Use, tracked
from qtoolkit.scaling import Hessian, QArray, smoothing_factors
from qtoolkit.scaling.internal import Contraction, check_inputs, searched, solved

Array = jax.Array
Params = dict[str, Array]
METHODS = ("nearest", "gptq", "awq", "awq+gptq", "smoothquant", "smoothquant+gptq")
_STATIC: Any = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class InputStatistics:
    """Sums over the inputs of every kernel of a model. A pytree of `Hessian`s.

    Attributes:
      hessians: One for each kernel; kernels of a stack have one each.
      keys: For each the name of the parameter, "layers/0/kernel", and its place in a stack.
      hows: For each the axes of the kernel.
    """

    hessians: tuple[Hessian, ...]
    keys: tuple[Key, ...] = dataclasses.field(metadata=_STATIC)
    hows: tuple[Contraction, ...] = dataclasses.field(metadata=_STATIC)

    def merge(self, other: "InputStatistics") -> "InputStatistics":
        """The statistics of the batches of both."""
        both = dict(zip(self.keys, zip(self.hessians, self.hows, strict=True), strict=True))
        for key, hessian, how in zip(other.keys, other.hessians, other.hows, strict=True):
            both[key] = (both[key][0].merge(hessian) if key in both else hessian, how)
        return _statistics(both)

    def merge_across(self, axis_name: str | tuple[str, ...]) -> "InputStatistics":
        """The statistics over all devices along these axes of `jax.shard_map`."""
        merged = tuple(hessian.merge_across(axis_name) for hessian in self.hessians)
        return dataclasses.replace(self, hessians=merged)

    def __str__(self) -> str:
        return "\n".join(
            f"{_shown(key)}: {hessian!r}"
            for key, hessian in zip(self.keys, self.hessians, strict=True)
        )


def _statistics(seen: Mapping[Key, tuple[Hessian, Contraction]]) -> InputStatistics:
    hessians, hows = zip(*seen.values(), strict=True) if seen else ((), ())
    return InputStatistics(tuple(hessians), tuple(seen), tuple(hows))


class PlainModel(NamedTuple):
    """A plain model as the flow needs it.

    Attributes:
      call: From parameters by name and a batch to anything that depends on all matmuls.
      params: The parameters by name.
    """

    call: Callable[[Params, Batch], Any]
    params: Params

    def tracked(self, batches: Sequence[Batch], visit: Callable[[Use], Array | None]) -> None:
        names = list(self.params)
        stored = [name for name in names if isinstance(self.params[name], QArray)]
        if stored:
            raise ValueError(
                f"quantize: {stored[0]} is stored as codes already, expected the model that it "
                "came from"
            )

        def function(arrays: list[Array], batch: Batch) -> Any:
            return self.call(dict(zip(names, arrays, strict=True)), batch)

        tracked(function, self.params, batches, visit)


class Settings(NamedTuple):
    """What `quantize` of the Flax packages was told; see there."""

    method: str
    is_sequential: bool = False
    damping: float = 0.01
    act_order: bool = False

    @property
    def needs_inputs(self) -> bool:
        return self.method != "nearest"


def settings(
    method: str, calibration: Any, sequential: bool, damping: float, act_order: bool
) -> Settings:
    if method not in METHODS:
        raise ValueError(f"quantize: method={method!r}, expected one of {', '.join(METHODS)}")
    if (calibration is None) != (method == "nearest"):
        what = "no calibration" if calibration is None else "a calibration"
        raise ValueError(
            f"quantize: {what} for method={method!r}, expected batches of inputs for GPTQ, AWQ and "
            "SmoothQuant: quantize(model, recipe, calibration=[batch], method='gptq')"
        )
    if sequential and "gptq" not in method:
        raise ValueError(f"quantize: sequential=True for method={method!r}, expected GPTQ")
    return Settings(method, bool(sequential), damping, bool(act_order))


class Tuned(NamedTuple):
    """What a method made of a model.

    Attributes:
      kernels: The kernels that it quantized itself, by name; others are to be rounded to nearest.
      params: All parameters, some of them multiplied by factors.
    """

    kernels: dict[str, QArray]
    params: Params


def input_statistics(
    model: PlainModel, batches: Iterable[Any], dtype: Any = jnp.float32
) -> InputStatistics:
    """The statistics over all batches, taken one by one."""
    seen: dict[Key, tuple[Hessian, Contraction]] = {}
    for batch in checked_batches("calibrate", batches):
        model.tracked([batch], lambda use: _observed(seen, use, dtype))
    return _statistics(seen)


def checked_batches(where: str, batches: Any) -> list[Batch]:
    is_one = hasattr(batches, "dtype") or isinstance(batches, dict | str)
    if is_one or not (hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")):
        kind = "None" if batches is None else f"one {type(batches).__name__}"
        raise TypeError(
            f"{where}: calibration is {kind}, expected an iterable of batches of inputs, e.g. "
            "[batch], or what calibrate(model, batches, 'hessian') returns"
        )
    found = [Batch.of(batch) for batch in batches]
    if not found:
        raise ValueError(f"{where}: not calibrated: there are no batches, expected one or more")
    return found


def _observed(seen: dict[Key, Any], use: Use, dtype: Any = jnp.float32) -> None:
    for i in range(use.batches):
        rows = exact_float32(use.rows(i))
        known = seen.get(use.key)
        state = known[0] if known else Hessian.of(*rows.shape[:-2], rows.shape[-1], dtype=dtype)
        seen[use.key] = state.observe(rows), use.how


def tuned(
    model: PlainModel, kernels: Mapping[str, Operand], calibration: Any, settings: Settings
) -> Tuned:
    """Quantizes kernels by a method, or changes parameters so that rounding to nearest loses less.

    Args:
      kernels: How each kernel is rounded, by name.
      calibration: Batches, or `InputStatistics`.
    """
    for name, operand in kernels.items():
        _check_operand(name, operand)
    factors = settings.method.removesuffix("gptq").removesuffix("+")
    is_known = isinstance(calibration, InputStatistics)
    if is_known and (factors or settings.is_sequential):
        what = settings.method if factors else "sequential=True"
        raise TypeError(
            f"quantize: calibration is an InputStatistics, and {what} runs the model; expected an "
            "iterable of batches"
        )
    batches = [] if is_known else _alike(checked_batches("quantize", calibration))
    if factors:
        model, unfolded = _with_factors(model, kernels, batches, factors)
        _warn_of(factors, unfolded)
    if "gptq" not in settings.method:
        return Tuned({}, model.params)
    solver = _Solver(kernels, settings)
    if is_known:
        rows = zip(calibration.hessians, calibration.hows, strict=True)
        solver.seen.update(zip(calibration.keys, rows, strict=True))
    else:
        model.tracked(batches, solver.visit)
    return Tuned({name: solver.joined(name, model.params[name]) for name in kernels}, model.params)


def _warn_of(method: str, unfolded: Sequence[str]) -> None:
    if unfolded:
        some = ", ".join(unfolded[:8]) + (" ..." if len(unfolded) > 8 else "")
        warnings.warn(
            f"quantize: {method}: {len(unfolded)} kernels have no factors, because no norm or "
            f"matmul before them could take the reciprocals and change nothing else: {some}",
            stacklevel=5,
        )


@dataclasses.dataclass
class _Solver:
    """GPTQ for the kernels of a model.

    Attributes:
      seen: The inputs of each kernel, and its axes.
      solved: The kernels that are quantized; later layers compute with these if it is sequential.
    """

    kernels: Mapping[str, Operand]
    settings: Settings
    seen: dict[Key, tuple[Hessian, Contraction]] = dataclasses.field(default_factory=dict)
    solved: dict[Key, QArray] = dataclasses.field(default_factory=dict)

    def visit(self, use: Use) -> Array | None:
        if use.key[0] not in self.kernels:
            return None
        if use.key not in self.solved:
            _observed(self.seen, use)
            if self.settings.is_sequential:
                self.solved[use.key] = self.solve(use.key, use.kernel)
        return self.solved[use.key].dequantize() if self.settings.is_sequential else None

    def solve(self, key: Key, kernel: Array) -> QArray:
        hessian, how = self.seen[key]
        spec = _spec(self.kernels[key[0]], how, kernel.shape)
        options = self.settings.damping, self.settings.act_order, spec.element.bits in WIDTHS
        return solved(f"quantize: {_shown(key)}", kernel, spec, hessian, how, *options)

    def joined(self, name: str, array: Array) -> QArray:
        """A kernel, or the stack of all kernels of a parameter."""
        indices = _indices(name, array, self.seen)
        keys = [(name, index) for index in indices]
        parts = [self.solved[k] if k in self.solved else self.solve(k, array[k[1]]) for k in keys]
        lead = array.shape[: len(indices[0])]
        if not lead:
            return parts[0]
        return jax.tree.map(lambda *xs: jnp.stack(xs).reshape(*lead, *xs[0].shape), *parts)


def _indices(name: str, array: Array, seen: Mapping[Key, Any]) -> list[tuple[int, ...]]:
    """The places of the kernels in their stack, () for a single one."""
    ranks = {len(index) for other, index in seen if other == name}
    rank = max(ranks, default=0)
    indices = list(np.ndindex(array.shape[:rank]))
    missing = [index for index in indices if (name, index) not in seen]
    if missing:
        raise ValueError(
            f"quantize: {_shown((name, missing[0]))}: no batch reached a matmul of it, expected "
            "inputs for every kernel; give batches that reach it, or exclude the layer by a rule "
            "with None (so, too, convolutions with groups, and matmuls in a while_loop)"
        )
    return indices


def _shown(key: Key) -> str:
    name, index = key
    return f"{name}{list(index)}" if index else name


def _alike(batches: list[Batch]) -> list[Batch]:
    def shapes(batch: Batch) -> Any:
        return jax.tree.structure(batch), [(x.shape, x.dtype) for x in batch.arrays]

    for batch in batches[1:]:
        if shapes(batch) != shapes(batches[0]):
            raise ValueError(
                "quantize: batches differ in shape, dtype or structure, expected the same: all run "
                "through a layer before the next one; leave out the last, shorter one"
            )
    return batches


def _check_operand(name: str, operand: Operand) -> None:
    is_plain = operand.scaling == Current() and operand.projection.rounding == "nearest_even"
    if not is_plain or operand.transform is not None:
        raise ValueError(
            f"quantize: {name}: the recipe rounds the kernel by {operand}, expected current scales "
            "and rounding to nearest, which is what GPTQ, AWQ and SmoothQuant improve on"
        )


def _spec(operand: Operand, how: Contraction, shape: tuple[int, ...]) -> BlockFormat:
    kept = tuple(a for a in range(len(shape)) if a not in (*how.contracted, *how.batch))
    made = rounding_of(operand, Axes(how.contracted, kept), shape, ()).operand
    assert made is not None
    return made.spec


class _Group(NamedTuple):
    """The kernels that read the same inputs."""

    node: Node
    uses: dict[Key, tuple[Array, Contraction]]
    hessian: Hessian


def _with_factors(
    model: PlainModel, kernels: Mapping[str, Operand], batches: Sequence[Batch], method: str
) -> tuple[PlainModel, tuple[str, ...]]:
    """The model with factors in its kernels, and their reciprocals in what writes the inputs."""
    groups: dict[int, _Group] = {}
    sources: dict[Key, list[Node]] = {}

    def visit(use: Use) -> None:
        place = id(use.node)
        if place not in groups:
            seen: dict[Key, Any] = {}
            _observed(seen, use)
            groups[place] = _Group(use.node, {}, seen[use.key][0])
        groups[place].uses[use.key] = use.kernel, use.how
        sources.setdefault(use.key, []).append(use.source)

    model.tracked(batches, visit)
    params, unfolded = dict(model.params), []
    for group in groups.values():
        names = [key[0] for key in group.uses if key[0] in kernels]
        roots = group.node.roots
        is_free = all(root.is_read_only_by(group.uses) for root in roots)
        is_free &= all(len(sources[key]) == 1 for key in group.uses)
        if not roots or not is_free or not all(sources[key][0].is_used_once for key in group.uses):
            unfolded += names
        elif names:
            _fold(params, roots, group, _factors(kernels, group, method))
    return model._replace(params=params), tuple(dict.fromkeys(unfolded))


def _factors(kernels: Mapping[str, Operand], group: _Group, method: str) -> Array:
    """The factors of a group: powers of two for half precision, which multiplies exactly then.

    Kernels that stay high precision are multiplied, but do not decide.
    """
    uses = {key: use for key, use in group.uses.items() if key[0] in kernels}
    arrays = [array for array, _ in uses.values()]
    is_half = any(array.dtype != jnp.float32 for array, _ in group.uses.values())
    where = f"quantize: {_shown(next(iter(uses)))}"
    if method == "awq":
        hows = [
            (_spec(kernels[key[0]], how, array.shape), how) for key, (array, how) in uses.items()
        ]
        return searched(where, arrays, group.hessian, hows, power_of_two=is_half)
    amaxes = []
    for array, how in uses.values():
        check_inputs(where, array, group.hessian, how)
        magnitudes = jnp.abs(how.matrices(exact_float32(array)))
        amaxes.append(jnp.max(magnitudes, (0, 2)))
    largest = jnp.max(jnp.stack(amaxes), 0)
    return smoothing_factors(group.hessian.largest.reshape(-1), largest, power_of_two=is_half)


def _fold(params: Params, roots: Sequence[Root], group: _Group, factors: Array) -> None:
    for key, (array, how) in group.uses.items():
        wide = how.matrices(exact_float32(array)) * factors.reshape(-1, math.prod(factors.shape), 1)
        _put(params, key, how.restored(wide, array.shape))
    for root in roots:
        name, index = root.key
        array = exact_float32(params[name][index])
        along = jnp.expand_dims(factors, [a for a in range(array.ndim) if a != root.axis])
        _put(params, root.key, array / along)


def _put(params: Params, key: Key, array: Array) -> None:
    name, index = key
    params[name] = params[name].at[index].set(array.astype(params[name].dtype))
