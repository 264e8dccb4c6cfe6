"""Checks what loaders read beside the codes: the config and static input scales. No JAX here.

From the codes and scales of a converted checkpoint it makes the plan of the conversion again, and
compares what the layout writes for that plan with what is there. Other programs may write other
configs, so less of these is checked.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from qtoolkit.checkpoints._base import Source
from qtoolkit.checkpoints._config_differences import GROUPS, IGNORED, differences
from qtoolkit.checkpoints._dequantized import (
    DequantizedSource,
    folder_of,
    own_layout,
    quantization_config,
)
from qtoolkit.checkpoints._header import NUMPY_DTYPES, CheckpointError, TensorInfo, shown
from qtoolkit.checkpoints._plan import TensorPlan
from qtoolkit.checkpoints._planner import METADATA_KEY, kept_modules, used_schemes
from qtoolkit.checkpoints._roles import module_of
from qtoolkit.checkpoints._source import CONFIG, Folder, read_json
from qtoolkit.checkpoints._storage import join, storage
from qtoolkit.checkpoints._stored import Entry, Stored
from qtoolkit.checkpoints.layouts import LAYOUTS, Layout, Scheme

_KEY = "quantization_config"
_AGAIN = "convert it again"
_FLOATS = ("F32", "BF16", "F16", "F64")
_MOST = 2**16  # elements of a tensor of scales at most; it may have one for each head


def problems_beside(source: Source, target: Source) -> Iterator[str]:
    """Yields a line for each thing beside the codes of `target` that is not as it should be."""
    folder = folder_of(target)
    config = {} if folder is None else quantization_config(folder)
    if not isinstance(target, DequantizedSource):
        yield from _says_too_much(config)
        return
    own = (own_layout(target) or "plain") if METADATA_KEY in target.metadata else ""
    is_ours = own in LAYOUTS
    layout = LAYOUTS[own if is_ours else target.layout]
    if is_ours and folder is not None and not folder.config.get(_KEY):
        config = {}  # loaders may not find it where it is in config.json
    if folder is not None and not config:
        yield from _unsaid(folder, layout, target.layout)
    plans: list[TensorPlan] = []
    unknown: list[str] = []
    if layout.linear_only:
        plans, unknown = _plans(source, target, layout, config)
    if is_ours:
        yield from (_not_of(target.stored[name], layout) for name in unknown)
        if folder is not None and config and not unknown:
            yield from _config_problems(folder, config, layout, plans)
    else:
        yield from _listed(config, target)
    yield from _scale_problems(source, target, plans, is_ours and not unknown)


def _unsaid(folder: Folder, layout: Layout, named: str) -> Iterator[str]:
    """The line for a folder whose config.json does not say that its weights are quantized.

    transformers then takes the codes for weights, without an error: SmolLM2-135M in E4M3 has a
    perplexity of 17 million instead of 18.
    """
    path = join(folder.path, CONFIG)
    if layout.linear_only or storage(path).kind(path) == "file":
        yield (
            f"{CONFIG}: no quantization_config, expected that of layout {named}: loaders take "
            f"codes for weights, without an error; {_AGAIN}"
        )


def _says_too_much(config: Mapping[str, Any]) -> Iterator[str]:
    """The line for a config that says that weights are quantized, if none is."""
    method = config.get("quant_method", "compressed-tensors")
    key = {"compressed-tensors": GROUPS, "modelopt": "quant_algo"}.get(str(method))
    # If only the attention cache is quantized, the config has neither key.
    if config and (key is None or config.get(key)):
        yield (
            f"{CONFIG}: quantization_config of {shown(str(method))}, and no weight is quantized, "
            f"expected none: loaders look for codes; remove it, or {_AGAIN}"
        )


def _plans(
    source: Source, target: DequantizedSource, layout: Layout, config: Mapping[str, Any]
) -> tuple[list[TensorPlan], list[str]]:
    """The plan whose result is `target`; and names of weights that no scheme of the layout fits."""
    schemes: dict[str, Scheme] = {}
    unknown = []
    for name, weight in target.stored.items():
        info = source.tensors.get(name)
        if info is None or info.shape != weight.shape:
            continue  # another check reports it
        scheme = _scheme(info, weight, layout)
        if scheme is None:
            unknown.append(name)
        else:
            schemes[name] = scheme
    maybe = [name for name, scheme in schemes.items() if scheme in layout.static]
    if maybe and _is_static(maybe, target, config):
        schemes |= {name: layout.static[schemes[name]] for name in maybe}
    infos = source.tensors.values()
    return [_plan(info, schemes.get(info.name), layout) for info in infos], unknown


def _scheme(info: TensorInfo, weight: Stored, layout: Layout) -> Scheme | None:
    """The scheme with which the layout writes a weight to these entries; None if it has none."""
    for scheme in layout.schemes if len(info.shape) == 2 else ():
        with contextlib.suppress(CheckpointError):  # blocks that do not fill the matrix
            if _parts(layout.store(info, scheme, (), 1.0)) == _parts(weight):
                return scheme
    return None


def _is_static(names: Iterable[str], target: DequantizedSource, config: Mapping[str, Any]) -> bool:
    """Whether activations of these weights should have static scales.

    They should if all have one, or the config says so; without a config, if any has one.
    """
    has_scale = [f"{module_of(name)}.input_scale" in target.source.tensors for name in names]
    groups = config.get(GROUPS)
    dynamic = [
        group["input_activations"].get("dynamic")
        for group in (groups.values() if isinstance(groups, dict) else ())
        if isinstance(group, dict) and isinstance(group.get("input_activations"), dict)
    ]
    return all(has_scale) or (any(has_scale) if not config else False in dynamic)


def _plan(info: TensorInfo, scheme: Scheme | None, layout: Layout) -> TensorPlan:
    if scheme is None:
        return TensorPlan(source=info, action="keep", reason="", dtype=info.dtype)
    return TensorPlan.quantized(info, layout.store(info, scheme, (), 1.0), scheme)


def _parts(weight: Stored) -> tuple[Entry, ...]:
    """The entries of codes and scales."""
    return tuple(x for x in (weight.codes, weight.scale, weight.second) if x is not None)


def _not_of(weight: Stored, layout: Layout) -> str:
    parts = ", ".join(f"{shown(entry.name)} {_shown(entry)}" for entry in _parts(weight))
    return (
        f"{shown(weight.name)}: {parts}, expected what layout {layout.name} writes of a weight "
        f"{list(weight.shape)}; {_AGAIN}"
    )


def _config_problems(
    folder: Folder, config: Mapping[str, Any], layout: Layout, plans: Sequence[TensorPlan]
) -> Iterator[str]:
    """A line for each difference of the config, and of further files, to what `convert` writes."""
    used, kept = used_schemes(plans), kept_modules(plans)
    if not used:
        yield (
            f"{CONFIG}: quantization_config, expected none: the weights are in layout "
            f"{layout.name}, of which loaders know nothing; {_AGAIN}"
        )
        return
    where = f"{CONFIG}: quantization_config"
    yield from differences(config, layout.config(used, kept), where)
    for name, content in layout.files(used, kept).items():
        path = join(folder.path, name)
        if storage(path).kind(path) == "file":
            yield from differences(read_json(path), content, name)
        else:
            yield f"{name}: is missing, expected what layout {layout.name} has; {_AGAIN}"


def _listed(config: Mapping[str, Any], target: DequantizedSource) -> Iterator[str]:
    """A line for each quantized module that another program's config lists as not quantized.

    Only names in full are found: matching a regular expression of a file may take for ever.
    """
    modules = {module_of(name) for name in target.stored}
    for key in IGNORED:
        names = config.get(key)
        for name in names if isinstance(names, list) else ():
            if isinstance(name, str) and name in modules:
                yield (
                    f"{CONFIG}: quantization_config.{key} has {shown(name)}, which is quantized, "
                    "expected modules that are not: loaders take its codes for weights; take it "
                    f"out, or {_AGAIN}"
                )


def _scale_problems(
    source: Source, target: DequantizedSource, plans: Iterable[TensorPlan], is_ours: bool
) -> Iterator[str]:
    """A line for each static scale of activations, or attention cache, that is wrong or missing."""
    expected = {
        entry.name: entry
        for plan in plans
        if plan.stored is not None
        for entry, _ in plan.stored.constants
    }
    for name in (name for name in expected if name not in target.source.tensors):
        yield f"{shown(name)}: is missing, expected {_shown(expected[name])}; {_AGAIN}"
    for name, info in target.beside.items():
        if name in source.tensors:
            continue  # it is compared with that of the source
        if is_ours and name not in expected and name.endswith("input_scale"):
            yield (
                f"{shown(name)}: is there, expected none: activations have no static scales; "
                f"{_AGAIN}"
            )
        elif problem := _scale_problem(target, info, expected.get(name) if is_ours else None):
            yield f"{shown(name)}: {problem}"


def _scale_problem(target: DequantizedSource, info: TensorInfo, expected: Entry | None) -> str:
    """What is wrong with a tensor that multiplies activations; "" if nothing."""
    got = f"{info.dtype} {list(info.shape)}"
    if expected is not None and (info.dtype, info.shape) != expected[1:]:
        return f"{got}, expected {_shown(expected)}; {_AGAIN}"
    if expected is None and (info.dtype not in _FLOATS or not 0 < info.size <= _MOST):
        return f"{got}, expected a float of one element; {_AGAIN}"
    data = np.empty(info.nbytes, np.uint8)
    target.source.read_into(info.name, 0, data.data)
    values = data.view(NUMPY_DTYPES[info.dtype]).astype(np.float64)
    bad = values[~((values > 0) & (values < math.inf))]
    if not len(bad):
        return ""
    is_input = info.name.endswith("input_scale")
    remedy = f"give it with --input-scales, and {_AGAIN}" if is_input else "calibrate it again"
    return f"{bad[0]:g}, expected a number above 0, as every calibration gives; {remedy}"


def _shown(entry: Entry) -> str:
    return f"{entry.dtype} {list(entry.shape)}"
