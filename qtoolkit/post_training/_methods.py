"""GPTQ, AWQ and SmoothQuant for the kernels of a model, whichever Flax package it is from."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qtoolkit.casts.internal import FLOATS, WIDTHS, exact_float32, serializable
from qtoolkit.post_training._channels import Key
from qtoolkit.post_training._folding import (
    Graph,
    Params,
    Readers,
    Transforms,
    axes_of,
    rotated,
    shown,
    spec_of,
    stripped,
    with_factors,
)
from qtoolkit.post_training._storing import stored_kernel
from qtoolkit.post_training._tracking import Use, tracked
from qtoolkit.products import Current, Operand
from qtoolkit.products.internal import Batch, listed, warn
from qtoolkit.scaling import Hessian, QArray, gptq
from qtoolkit.scaling.internal import Contraction, InputTransform

Array = jax.Array
_STEPS = (("", "hadamard"), ("", "awq", "smoothquant"), ("", "gptq"))  # in this order
METHODS = ("nearest", *("+".join(filter(None, x)) for x in itertools.product(*_STEPS) if any(x)))
_STATIC: Any = {"static": True}


@serializable
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
            f"{shown(key)}: {hessian!r}"
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
    """The options of `quantize`, see `qtoolkit.nnx.quantize`."""

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
            f"quantize: {what} for method={method!r}, expected batches of inputs, and for "
            "'nearest' none: quantize(model, recipe, calibration=[batch], method='gptq'); a batch "
            "has all arguments of the model, as (x, False) or {'x': x, 'train': False}"
        )
    if sequential and "gptq" not in method:
        raise ValueError(f"quantize: sequential=True for method={method!r}, expected GPTQ")
    return Settings(method, bool(sequential), damping, bool(act_order))


class Tuned(NamedTuple):
    """A model after a method.

    Attributes:
      kernels: The kernels that it quantized itself, by name; others are to be rounded to nearest.
      params: All parameters, some of them with factors or rotated.
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
    listed = [x if isinstance(x, Batch) else Batch.of(x) for x in batches]
    if not listed:
        raise ValueError(f"{where}: not calibrated: there are no batches, expected one or more")
    return listed


def _observed(
    seen: dict[Key, Any], use: Use, dtype: Any = jnp.float32, transform: Any = None
) -> None:
    """Adds the inputs of a kernel, divided and rotated by its `InputTransform` if it has one."""
    how, shape = use.how, use.kernel.shape
    for i in range(use.batches):
        rows = use.rows(i)
        if rows.dtype not in FLOATS:
            raise TypeError(
                f"calibration: {shown(use.key)}: its inputs have dtype {rows.dtype}, expected "
                f"{', '.join(map(str, FLOATS))}; convert the batches or the model"
            )
        rows = exact_float32(rows)
        if transform:
            rows = rows.reshape(*rows.shape[:-1], *(shape[axis] for axis in how.contracted))
            axes = range(rows.ndim - len(how.contracted), rows.ndim)
            pairs = tuple(zip(axes, how.contracted, strict=True))
            rows = transform.of_inputs(rows, pairs, len(shape))
            rows = rows.reshape(*rows.shape[: axes[0]], -1)
        if use.key in seen:
            state = seen[use.key][0]
        else:
            batch, channels, _ = how.sizes(shape)
            lead = (batch,) if how.batch or how.groups > 1 else ()
            state = Hessian.of(*lead, channels, dtype=dtype)
        if use.sizes is None:
            rows = rows.reshape(*state.rows.shape, -1, state.channels)
        sizes = None if use.sizes is None else use.sizes(i)
        seen[use.key] = state.observe(rows, sizes), how


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
    steps = settings.method.split("+")
    is_known = isinstance(calibration, InputStatistics)
    if is_known and (steps != ["gptq"] or settings.is_sequential):
        what = "sequential=True" if steps == ["gptq"] else settings.method
        raise TypeError(
            f"quantize: calibration is an InputStatistics, but {what} must run the model; expected "
            "an iterable of batches"
        )
    batches = [] if is_known else _alike(checked_batches("quantize", calibration))
    transforms: Transforms = {}
    for step in steps:
        if step == "gptq":
            continue
        graph = _graph(model, batches, with_sums=step != "hadamard")
        for name in kernels:
            _indices(name, model.params[name], graph.of_key)
        if step == "hadamard":
            params, transforms = rotated(graph, model.params, kernels)
        else:
            params, transforms = with_factors(graph, model.params, kernels, step, transforms)
        model = model._replace(params=params)
    if "gptq" not in steps:
        made = {
            name: _rounded(name, model.params[name], kernels[name], graph.use(name), one)
            for name, one in transforms.items()
        }
        seen = {key: group.hessian for group in graph.groups for key in group.uses}
        _warn_of_skipped_batches(kernels, seen)
        return Tuned(made, model.params)
    solver = _Solver(kernels, settings, transforms, model.params)
    if is_known:
        rows = zip(calibration.hessians, calibration.hows, strict=True)
        solver.seen.update(zip(calibration.keys, rows, strict=True))
    else:
        model.tracked(batches, solver.visit)
    made = {name: solver.joined(name) for name in kernels}
    solver.warn_of_few_rows()
    _warn_of_skipped_batches(kernels, {key: hessian for key, (hessian, _) in solver.seen.items()})
    return Tuned(made, model.params)


def _warn_of_skipped_batches(
    kernels: Mapping[str, Operand], seen: Mapping[Key, Hessian | None]
) -> None:
    names = [
        f"{shown(key)} ({hessian.bad})"
        for key, hessian in seen.items()
        if key[0] in kernels and hessian is not None and int(hessian.bad)
    ]
    if names:
        warn(
            "quantize: inputs of these kernels hold NaNs or infinities in some batches, which are "
            f"skipped: {listed(names)}; expected finite inputs",
            UserWarning,
        )


def _graph(model: PlainModel, batches: Sequence[Batch], with_sums: bool) -> Graph:
    """The kernels of a model by the inputs that they read, from one run."""
    groups: dict[Any, Readers] = {}

    def visit(use: Use) -> None:
        place = use.node, use.inputs
        if place not in groups:
            seen: dict[Key, Any] = {}
            if with_sums:
                _observed(seen, use)
            groups[place] = Readers(use.node, {}, seen[use.key][0] if seen else None)
        groups[place].uses[use.key] = stripped(use)

    model.tracked(batches, visit)
    return Graph.of(list(groups.values()))


def _rounded(
    name: str, array: Array, operand: Operand, use: Use, transform: InputTransform
) -> QArray:
    """A kernel rounded to nearest after its factors or its rotation."""
    shape, where = use.kernel.shape, f"quantize: {name}"
    axes, stacked = axes_of(use.how, shape), array.ndim - len(shape)
    made = stored_kernel(where, transform.of_kernel(array), operand, axes, stacked)
    return dataclasses.replace(made, dtype=array.dtype, **transform._asdict())


@dataclasses.dataclass
class _Solver:
    """GPTQ for the kernels of a model.

    Attributes:
      transforms: What is done to the inputs of a kernel first.
      params: All parameters, by name.
      seen: The inputs of each kernel, and its axes.
      solved: The kernels that are quantized; later layers compute with these if it is sequential.
    """

    kernels: Mapping[str, Operand]
    settings: Settings
    transforms: Transforms
    params: Params
    seen: dict[Key, tuple[Hessian, Contraction]] = dataclasses.field(default_factory=dict)
    solved: dict[Key, QArray] = dataclasses.field(default_factory=dict)

    def visit(self, use: Use) -> Array | None:
        if use.key[0] not in self.kernels:
            return None
        if use.key not in self.solved:
            _observed(self.seen, use, transform=self.transform(use.key))
            if self.settings.is_sequential:
                self.solved[use.key] = self.solve(use.key)
        return self.solved[use.key].dequantize() if self.settings.is_sequential else None

    def transform(self, key: Key) -> InputTransform:
        factors, rotation = self.transforms.get(key[0], InputTransform())
        return InputTransform(None if factors is None else factors[key[1]], rotation)

    def solve(self, key: Key) -> QArray:
        (hessian, how), kernel = self.seen[key], self.params[key[0]][key[1]]
        spec, transform = spec_of(self.kernels[key[0]], how, kernel.shape), self.transform(key)
        made = gptq(
            transform.of_kernel(kernel) if transform else kernel,
            *(spec, hessian),
            axis=how,
            damping=self.settings.damping,
            act_order=self.settings.act_order,
            packed=spec.element.bits in WIDTHS,
            where=f"quantize: {shown(key)}",
        )
        return dataclasses.replace(made, dtype=kernel.dtype, **transform._asdict())

    def warn_of_few_rows(self) -> None:
        few = [
            f"{shown(key)}[{', '.join(map(str, np.flatnonzero(is_few)))}]"
            for key, (hessian, _) in self.seen.items()
            if key in self.solved
            and (is_few := np.asarray(hessian.rows.reshape(-1) < hessian.channels)).any()
        ]
        if few:
            warn(
                "quantize: gptq: experts or groups that got fewer rows of inputs than they have "
                f"channels are rounded to nearest: {listed(few)}; calibrate with more samples",
                UserWarning,
            )

    def joined(self, name: str) -> QArray:
        """A kernel, or the stack of all kernels of a parameter."""
        array = self.params[name]
        indices = _indices(name, array, self.seen)
        for index in indices:
            if (name, index) not in self.solved:
                self.solved[name, index] = self.solve((name, index))
        parts = [self.solved[name, index] for index in indices]
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
            f"quantize: {shown((name, missing[0]))}: no batch reached a matmul of it, expected "
            "inputs for every kernel; give batches that reach it, or exclude the layer by a rule "
            "with None"
        )
    return indices


def _alike(batches: list[Batch]) -> list[Batch]:
    def shapes(batch: Batch) -> Any:
        return jax.tree.structure(batch), [(x.shape, x.dtype) for x in batch.arrays]

    for batch in batches[1:]:
        if shapes(batch) != shapes(batches[0]):
            raise ValueError(
                "quantize: batches differ in shape, dtype or structure, expected the same: all run "
                "through a layer before the next one; skip the last, shorter one"
            )
    return batches


def _check_operand(name: str, operand: Operand) -> None:
    is_plain = operand.scaling == Current() and operand.projection.rounding == "nearest_even"
    if not is_plain or operand.transform is not None or operand.joined:
        raise ValueError(
            f"quantize: {name}: the recipe rounds the kernel by {operand}, expected current scales "
            "and rounding to nearest, which is what GPTQ, AWQ and SmoothQuant improve on, and a "
            "kernel that is not joined"
        )
