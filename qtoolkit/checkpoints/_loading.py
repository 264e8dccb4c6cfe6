"""Checks what loaders read beside the codes: the config and static input scales. No JAX here.

From the codes and scales of a converted checkpoint it makes the plan of the conversion again, and
compares what the layout writes for that plan with what is there. Other programs may write other
configs, so less of these is checked.
"""

import json
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from qtoolkit.checkpoints._checks import kept_modules, used_schemes
from qtoolkit.checkpoints._decode import own_layout, quantization_config
from qtoolkit.checkpoints._folder import CONFIG, read_json
from qtoolkit.checkpoints._paths import join, storage
from qtoolkit.checkpoints._report import TensorPlan
from qtoolkit.checkpoints._roles import module_of
from qtoolkit.checkpoints._tensors import (
    FLOATS,
    NUMPY_DTYPES,
    Checkpoint,
    Entry,
    Tensor,
    shown,
)
from qtoolkit.checkpoints.layouts import LAYOUTS, Encoding, Layout, Scheme

_KEY = "quantization_config"
_AGAIN = "convert it again"
_MOST = 2**16  # elements of a tensor of scales at most; it may have one for each head
# Lists of modules that are not quantized.
IGNORED = ("ignore", "exclude_modules", "modules_to_not_convert")
# Lists whose order does not matter. Loaders take a module in the list for the first word, one that
# is not in it for the second.
_LISTS = {**dict.fromkeys(IGNORED, ("wide", "quantized")), "targets": ("quantized", "wide")}
GROUPS = "config_groups"
_UNCOMPARED = ("producer",)  # the version of a program


def config_problems(source: Checkpoint, target: Checkpoint) -> Iterator[str]:
    """Yields a line for each thing beside the codes of `target` that is not as it should be."""
    is_folder = target.folder is not None
    config = quantization_config(target)
    if not target.encodings:
        yield from _says_too_much(config)
        return
    own = (own_layout(target) or "plain") if "qtoolkit" in target.metadata else ""
    is_ours = own in LAYOUTS
    layout = LAYOUTS[own if is_ours else target.layout]
    if is_ours and is_folder and not target.config.get(_KEY):
        config = {}  # loaders may not find it where it is in config.json
    if is_folder and not config:
        yield from _no_config(target, layout)
    plans: list[TensorPlan] = []
    unknown: list[str] = []
    if layout.linear_only:
        plans, unknown = _plans(source, target, layout, config)
    if is_ours:
        yield from (_not_of(target.encodings[name], layout) for name in unknown)
        if is_folder and config and not unknown:
            yield from _of_config(target, config, layout, plans)
    else:
        yield from _listed(config, target)
    yield from _scale_problems(source, target, plans, is_ours and not unknown)


def _no_config(target: Checkpoint, layout: Layout) -> Iterator[str]:
    """The line for a folder whose config.json does not say that its weights are quantized.

    transformers then takes the codes for weights, without an error: SmolLM2-135M in E4M3 has a
    perplexity of 17 million instead of 18.
    """
    path = join(target.path, CONFIG)
    if layout.linear_only or storage(path).kind(path) == "file":
        yield (
            f"{CONFIG}: no quantization_config, expected that of layout {target.layout}: loaders "
            f"take codes for weights, without an error; {_AGAIN}"
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
    source: Checkpoint, target: Checkpoint, layout: Layout, config: Mapping[str, Any]
) -> tuple[list[TensorPlan], list[str]]:
    """The plan whose result is `target`; and names of weights that no scheme of the layout fits."""
    schemes: dict[str, Scheme] = {}
    unknown = []
    for name, weight in target.encodings.items():
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


def _scheme(info: Tensor, weight: Encoding, layout: Layout) -> Scheme | None:
    """The scheme with which the layout writes a weight to these entries; None if it has none."""
    rank = 3 if layout.experts_of else 2
    for scheme in layout.schemes if len(info.shape) == rank else ():
        fits = not layout.misfit(info.shape, scheme.spec)
        if fits and layout.encode(info.entry, scheme, (), 1.0).parts == weight.parts:
            return scheme
    return None


def _is_static(names: Iterable[str], target: Checkpoint, config: Mapping[str, Any]) -> bool:
    """Whether activations of these weights should have static scales.

    They should if all have one, or the config says so; without a config, if any has one.
    """
    has_scale = [f"{module_of(name)}.input_scale" in target.stored for name in names]
    groups = config.get(GROUPS)
    dynamic = [
        group["input_activations"].get("dynamic")
        for group in (groups.values() if isinstance(groups, dict) else ())
        if isinstance(group, dict) and isinstance(group.get("input_activations"), dict)
    ]
    return all(has_scale) or (any(has_scale) if not config else False in dynamic)


def _plan(info: Tensor, scheme: Scheme | None, layout: Layout) -> TensorPlan:
    if scheme is None:
        return TensorPlan(source=info, action="keep", reason="", dtype=info.dtype)
    return TensorPlan.quantized(info, layout.encode(info.entry, scheme, (), 1.0), scheme)


def _not_of(weight: Encoding, layout: Layout) -> str:
    parts = ", ".join(f"{shown(entry.name)} {entry}" for entry in weight.parts)
    return (
        f"{shown(weight.name)}: {parts}, expected what layout {layout.name} writes of a weight "
        f"{list(weight.shape)}; {_AGAIN}"
    )


def _of_config(
    target: Checkpoint, config: Mapping[str, Any], layout: Layout, plans: Sequence[TensorPlan]
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
        path = join(target.path, name)
        if storage(path).kind(path) == "file":
            yield from differences(read_json(path), content, name)
        else:
            yield f"{name}: is missing, expected what layout {layout.name} has; {_AGAIN}"


def _listed(config: Mapping[str, Any], target: Checkpoint) -> Iterator[str]:
    """A line for each quantized module that another program's config lists as not quantized.

    Only names in full are found: matching a regular expression of a file may take for ever.
    """
    modules = {module_of(name) for name in target.encodings}
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
    source: Checkpoint, target: Checkpoint, plans: Iterable[TensorPlan], is_ours: bool
) -> Iterator[str]:
    """A line for each static scale of activations, or attention cache, that is wrong or missing."""
    expected = {
        entry.name: entry
        for plan in plans
        if plan.encoding is not None
        for entry, _ in plan.encoding.constants
    }
    for name in (name for name in expected if name not in target.stored):
        yield f"{shown(name)}: is missing, expected {expected[name]}; {_AGAIN}"
    for name, info in target.auxiliary.items():
        if name in source.tensors:
            continue  # it is compared with that of the source
        if is_ours and name not in expected and name.endswith("input_scale"):
            yield (
                f"{shown(name)}: is there, expected none: activations have no static scales; "
                f"{_AGAIN}"
            )
        elif problem := _scale_problem(info, expected.get(name) if is_ours else None):
            yield f"{shown(name)}: {problem}"


def _scale_problem(info: Tensor, expected: Entry | None) -> str:
    """What is wrong with a tensor that multiplies activations; "" if nothing."""
    got = str(info.entry)
    if expected is not None and info.entry[1:] != expected[1:]:
        return f"{got}, expected {expected}; {_AGAIN}"
    if expected is None and (info.dtype not in FLOATS or not 0 < info.size <= _MOST):
        return f"{got}, expected a float of one element; {_AGAIN}"
    data = np.empty(info.nbytes, np.uint8)
    info.read_into(0, data.data)
    values = data.view(NUMPY_DTYPES[info.dtype]).astype(np.float64)
    bad = values[~((values > 0) & (values < math.inf))]
    if not len(bad):
        return ""
    is_input = info.name.endswith("input_scale")
    remedy = f"give it with --input-scales, and {_AGAIN}" if is_input else "calibrate it again"
    return f"{bad[0]:g}, expected a number above 0, as every calibration gives; {remedy}"


def differences(found: Mapping[str, Any], expected: Mapping[str, Any], where: str) -> Iterator[str]:
    """Yields a line for each difference. It begins with `where`, a file or a place in it."""
    for key in dict.fromkeys((*expected, *found)):
        if key in _UNCOMPARED:
            continue
        place = f"{where}{'.' if ': ' in where else ': '}{shown(key)}"
        there, here = found.get(key), expected.get(key)
        if key in _LISTS and isinstance(there, list) and isinstance(here, list):
            yield from _of_lists(there, here, place, *_LISTS[key])
        elif isinstance(there, dict) and isinstance(here, dict):
            if key == GROUPS:
                there, here = _paired(there, here)
            yield from differences(there, here, place)
        elif key not in found:
            yield f"{place} is missing, expected {_short(here)}; {_AGAIN}"
        elif key not in expected:
            yield f"{place} is {_short(there)}, expected no such key; {_AGAIN}"
        elif there != here:
            yield f"{place} is {_short(there)}, expected {_short(here)}; {_AGAIN}"


def _of_lists(
    found: list[Any], expected: list[Any], place: str, if_in: str, if_not: str
) -> Iterator[str]:
    there, here = ({_text(value): value for value in values} for values in (found, expected))
    for text in (text for text in there if text not in here):
        yield (
            f"{place} has {_short(there[text])}, expected no such entry: loaders take what it "
            f"names for {if_in}; {_AGAIN}"
        )
    for text in (text for text in here if text not in there):
        yield (
            f"{place} has no {_short(here[text])}, expected it: loaders take what it names for "
            f"{if_not}; {_AGAIN}"
        )


def _paired(
    found: Mapping[str, Any], expected: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The groups that only one of the two has, named anew: names and order do not matter."""
    there, here = (
        {_text(_sorted(group)): group for group in groups.values()} for groups in (found, expected)
    )
    return _without(there, here), _without(here, there)


def _without(groups: Mapping[str, Any], others: Container[str]) -> dict[str, Any]:
    left = (group for text, group in groups.items() if text not in others)
    return {f"group_{number}": group for number, group in enumerate(left)}


def _sorted(group: Any) -> Any:
    if not isinstance(group, dict) or not isinstance(group.get("targets"), list):
        return group
    return {**group, "targets": sorted(map(_text, group["targets"]))}


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return shown(text if len(text) <= 80 else text[:77] + "...")
