"""Checks a converted checkpoint: plans and quantizes its source again and compares the bytes.

From the codes and scales of the converted checkpoint it makes the plan of the conversion again, and
compares what the layout writes for that plan, config and static input scales too, with what is
there. Other programs may write other configs, so less of these is checked.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from qtoolkit.checkpoints import _storage as storage
from qtoolkit.checkpoints._checks import unquantized_modules, used_schemes
from qtoolkit.checkpoints._compare import opened
from qtoolkit.checkpoints._decode import own_layout, quantization_config
from qtoolkit.checkpoints._experts import split_alike
from qtoolkit.checkpoints._folder import CONFIG, read_json
from qtoolkit.checkpoints._produce import Production, Workers
from qtoolkit.checkpoints._report import Progress, TensorPlan, followed
from qtoolkit.checkpoints._roles import module_of
from qtoolkit.checkpoints._storage import Path, join
from qtoolkit.checkpoints._tensors import FLOATS, Checkpoint, Entry, Tensor, shown
from qtoolkit.checkpoints._values import Values
from qtoolkit.checkpoints.layouts import LAYOUTS, Encoding, Layout, Scheme
from qtoolkit.checkpoints.layouts._layout import HIGH_PRECISION
from qtoolkit.formats import DEEPSEEK_128X128, E4M3FN, FLOAT32

_AGAIN = "convert it again"
_MOST = 2**16  # elements of a tensor of scales at most; it may have one for each head
_UNCOMPARED = ("producer",)  # in a config: the version of a program


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verification:
    """What `verify` found.

    Attributes:
      source, converted: The two paths.
      tensors, quantized: How many tensors were compared, and how many of them are quantized.
      problems: A line for each difference; empty where all is as it should be.
    """

    source: str
    converted: str
    tensors: int
    quantized: int
    problems: tuple[str, ...]


def verify(src: Path, converted: Path, *, progress: Progress | None = None) -> Verification:
    """Quantize `src` again as `converted` is quantized, and compare every code and scale.

    Headers and index are checked when the two are opened. Each tensor of `src` must be there:
    unchanged, rounded to another dtype of high precision, or quantized. Its codes and scales must
    then be those of `qtoolkit.quantize`; in layout compressed-tensors scales follow that package's
    rules. Static input scales must be there if the config says so, and be finite and above 0;
    whether they are those of the calibration cannot be checked. If `convert` wrote the checkpoint,
    config.json and hf_quant_config.json must say of quantization what it writes for these weights.
    If another program did, config.json must only say that weights are quantized. Other files are
    not compared. Nothing is written; memory is a few slabs.

    Args:
      src: The checkpoint that was converted: a folder or a file.
      converted: The result, of any program that quantizes in one of the layouts.
      progress: Called with (name, bytes compared, bytes in all) of `src`.

    Returns:
      What was compared, and a line for each difference.

    Raises:
      CheckpointError: One of them is no checkpoint, or damaged.
      OSError: A file cannot be read; it names the file.

    Examples:
      >>> qt.checkpoints.save("model.safetensors", {"w": jnp.ones((64, 32))})
      >>> qt.checkpoints.save("other.safetensors", {"w": jnp.zeros((64, 32))})
      >>> report = qt.checkpoints.convert("model.safetensors", "fp8.safetensors", scaling="tensor")
      >>> qt.checkpoints.verify("model.safetensors", "fp8.safetensors").problems
      ()
      >>> qt.checkpoints.verify("other.safetensors", "fp8.safetensors").problems
      ('w: byte 0 is 126, expected 0; convert it again',)
    """
    storage.check_path(src, "src")
    storage.check_path(converted, "converted")
    with opened(src) as source, opened(converted) as target:
        source, target = split_alike(source, target)
        problems = [*_other_problems(source, target), *_changed(source, target, progress)] + [
            f"{shown(name)}: is not in {shown(str(src))}"
            for name in target.tensors
            if name not in source.tensors
        ]
        return Verification(
            source=str(src),
            converted=str(converted),
            tensors=sum(name in target.everything for name in source.tensors),
            quantized=sum(name in source.tensors for name in target.encodings),
            problems=tuple(problems),
        )


def _changed(source: Checkpoint, target: Checkpoint, progress: Progress | None) -> Iterator[str]:
    """A line for each tensor of the source that the target has not as the conversion gives it."""
    plans = {t.name: _plan(t, target) for t in source.tensors.values()}
    planned = [p for p in plans.values() if isinstance(p, TensorPlan)]
    production = Production(planned, Workers(), stored=source.stored)
    # All in one call, because it computes small tensors together.
    planned = [plan for plan in planned if plan.source.size]
    owner = {entry.name: plan.name for plan in planned for entry in plan.entries}
    made = itertools.groupby(production.chunks(planned), lambda chunk: owner[chunk[0]])
    for tensor in followed(source.tensors.values(), progress):
        plan = plans[tensor.name]
        if isinstance(plan, str):
            yield f"{shown(tensor.name)}: {plan}"
        elif tensor.size:
            _, chunks = next(made)
            if difference := _difference(chunks, plan, target):
                yield f"{shown(tensor.name)}: {difference}"


def _plan(tensor: Tensor, target: Checkpoint) -> TensorPlan | str:
    """What the conversion did with a tensor; or what is wrong if it did no such thing."""
    converted = target.everything.get(tensor.name)
    if converted is None or converted.shape != tensor.shape:
        got = "is missing" if converted is None else f"shape {list(converted.shape)}"
        return f"{got}, expected shape {list(tensor.shape)}"
    if converted.encoding is not None:
        if not converted.encoding.is_written:
            return (
                f"in layout {target.layout} as {converted.encoding.spec.name}, which is read, not "
                "written, expected codes that can be made again; measure it with `qtoolkit compare`"
            )
        encoding = _computed(converted.encoding, target)
        entry, group = encoding.tensor_scale, ""
        if entry is not None and entry.nbytes == 4:  # weights with an equal one may share it
            group = target.stored[entry.name].read().tobytes().hex()
        return TensorPlan(
            source=tensor,
            action="quantize",
            dtype=encoding.codes.dtype,
            spec=encoding.spec_as_stored,
            encoding=encoding,
            group=group,
        )
    if converted.dtype != tensor.dtype and not HIGH_PRECISION.keys() >= {
        converted.dtype,
        tensor.dtype,
    }:
        return f"dtype {converted.dtype}, expected {tensor.dtype}"
    return TensorPlan.unquantized(tensor, converted.dtype)


def _computed(encoding: Encoding, target: Checkpoint) -> Encoding:
    """The encoding, with the rules of scales of its layout."""
    spec = encoding.spec
    if target.layout in LAYOUTS:
        spec = LAYOUTS[target.layout].computed(spec)
    encoding = dataclasses.replace(encoding, spec=spec)
    # No file says whether DeepSeek's least amax of 1e-4 was used. If the least scale is exactly
    # 1e-4 / 448, it was: blocks with a smaller amax have that scale then.
    least = np.float32(DEEPSEEK_128X128.amax_epsilon) / np.float32(DEEPSEEK_128X128.largest)
    if len(spec.block) != 2 or (spec.element, spec.scale) != (E4M3FN, FLOAT32):
        return encoding
    scale, _ = Values(encoding, target.stored).scales()
    if scale is None or np.nanmin(scale, initial=np.inf) != least:
        return encoding
    spec = dataclasses.replace(spec, amax_epsilon=DEEPSEEK_128X128.amax_epsilon)
    return dataclasses.replace(encoding, spec=spec)


def _difference(
    chunks: Iterable[tuple[str, np.ndarray]], plan: TensorPlan, target: Checkpoint
) -> str:
    """Where the target first differs from what is produced again; "" where it does not."""
    name = plan.name
    places: dict[str, int] = {}
    for entry, array in chunks:
        wanted = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        got = np.empty_like(wanted)
        start = places.get(entry, 0)
        stored = target.stored if plan.encoding is not None else target.everything
        stored[entry].read_into(start, got.data)
        places[entry] = start + len(got)
        differ = np.flatnonzero(got != wanted)
        if len(differ):
            at = int(differ[0])
            return (
                "" if entry == name else f"{shown(entry)}: "
            ) + f"byte {start + at:,} is {got[at]}, expected {wanted[at]}; convert it again"
    return ""


# What loaders read besides codes and scales of weights.


def _other_problems(source: Checkpoint, target: Checkpoint) -> Iterator[str]:
    """A line for each thing that loaders read besides codes and that is not as it should be."""
    config = quantization_config(target)
    if not target.encodings:
        method = str(config.get("quant_method", "compressed-tensors"))
        key = {"compressed-tensors": "config_groups", "modelopt": "quant_algo"}.get(method)
        # If only the attention cache is quantized, the config has neither key.
        if config and (key is None or config.get(key)):
            yield (
                f"{CONFIG}: quantization_config of {shown(method)}, and no weight is quantized, "
                f"expected none: loaders look for codes; remove it, or {_AGAIN}"
            )
        return
    own = (own_layout(target) or "plain") if "qtoolkit" in target.metadata else ""
    is_ours, is_folder = own in LAYOUTS, target.folder is not None
    layout = LAYOUTS[own if is_ours else target.layout]
    if is_ours and not target.config.get("quantization_config"):
        config = {}  # loaders may not find it where it is in config.json
    has_file = is_folder and storage.kind_at(join(target.path, CONFIG)) == "file"
    if is_folder and not config and (layout.linear_only or has_file):
        # transformers then takes the codes for weights: SmolLM2-135M in E4M3 has a perplexity of 17
        # million instead of 18.
        yield (
            f"{CONFIG}: no quantization_config, expected that of layout {target.layout}: loaders "
            f"take codes for weights, without an error; {_AGAIN}"
        )
    schemes = _schemes(source, target, layout)
    unknown = [name for name, scheme in schemes.items() if scheme is None]
    plans = [
        TensorPlan.unquantized(info, info.dtype)
        if (scheme := schemes.get(name)) is None
        else TensorPlan.quantized(info, layout.encode(info.entry, scheme, (), 1.0), scheme)
        for name, info in source.tensors.items()
    ]
    if is_ours:
        for name in unknown:
            parts = ", ".join(f"{shown(e.name)} {e}" for e in target.encodings[name].parts)
            yield (
                f"{shown(name)}: {parts}, expected what layout {layout.name} writes of a weight "
                f"{list(source.tensors[name].shape)}; {_AGAIN}"
            )
        if is_folder and config and not unknown:
            yield from _config_problems(target, config, layout, plans)
    constants = [t.encoding.constants for t in plans if t.encoding is not None]
    expected = {entry.name: entry for entries in constants for entry, _ in entries}
    yield from _scale_problems(source, target, expected, is_ours and not unknown)


def _schemes(source: Checkpoint, target: Checkpoint, layout: Layout) -> dict[str, Scheme | None]:
    """The scheme with which the layout writes each weight to what is there; None if it has none."""
    if not layout.linear_only:
        return {}
    schemes: dict[str, Scheme | None] = {}
    rank = 3 if layout.experts_of else 2
    for name, weight in target.encodings.items():
        info = source.tensors.get(name)
        if info is None or info.shape != weight.shape:
            continue  # another check reports it
        fitting = (
            scheme
            for scheme in (layout.schemes if len(info.shape) == rank else ())
            if not layout.misfit(info.shape, scheme.spec)
            and layout.encode(info.entry, scheme, (), 1.0).parts == weight.parts
        )
        schemes[name] = next(fitting, None)
    maybe = [name for name, scheme in schemes.items() if scheme in layout.static]
    if 2 * sum(f"{module_of(name)}.input_scale" in target.stored for name in maybe) > len(maybe):
        schemes |= {name: layout.static[scheme] for name in maybe if (scheme := schemes[name])}
    return schemes


def _config_problems(
    target: Checkpoint, config: Mapping[str, Any], layout: Layout, plans: list[TensorPlan]
) -> Iterator[str]:
    """A line for each difference of the config, and of further files, to what `convert` writes."""
    used, unquantized = used_schemes(plans), unquantized_modules(plans)
    expected = layout.config(used, unquantized) if used else {}
    yield from _differences(config, expected, f"{CONFIG}: quantization_config.")
    for name, content in (layout.files(used, unquantized) if used else {}).items():
        if storage.kind_at(join(target.path, name)) == "file":
            yield from _differences(read_json(join(target.path, name)), content, f"{name}: ")
        else:
            yield f"{name}: is missing, expected what layout {layout.name} has; {_AGAIN}"


def _scale_problems(
    source: Checkpoint, target: Checkpoint, expected: Mapping[str, Entry], is_ours: bool
) -> Iterator[str]:
    """A line for each static scale of activations, or attention cache, that is wrong or missing."""
    for name in (name for name in expected if name not in target.stored):
        yield f"{shown(name)}: is missing, expected {expected[name]}; {_AGAIN}"
    for name, info in target.auxiliary.items():
        wanted = expected.get(name) if is_ours else None
        problem = ""
        if name in source.tensors or not name.endswith("scale"):
            continue  # the one is compared with that of the source, others are no scales
        if is_ours and wanted is None and name.endswith("input_scale"):
            problem = f"is there, expected none: activations have no static scales; {_AGAIN}"
        elif wanted is not None and info.entry[1:] != wanted[1:]:
            problem = f"{info.entry}, expected {wanted}; {_AGAIN}"
        elif wanted is None and (info.dtype not in FLOATS or not 0 < info.size <= _MOST):
            problem = f"{info.entry}, expected a float of one element; {_AGAIN}"
        else:
            values = info.read().astype(np.float64)
            bad = values[~((values > 0) & (values < math.inf))]
            if len(bad):
                problem = (
                    f"{bad[0]:g}, expected a number above 0, as every calibration gives; calibrate "
                    f"again, and {_AGAIN}"
                )
        if problem:
            yield f"{shown(name)}: {problem}"


def _differences(
    actual: Mapping[str, Any], expected: Mapping[str, Any], where: str
) -> Iterator[str]:
    """A line for each difference; of lists the order does not matter."""
    for key in dict.fromkeys((*expected, *actual)):
        there, here = actual.get(key), expected.get(key)
        place = f"{where}{shown(key)}"
        if key in _UNCOMPARED:
            continue
        if isinstance(there, dict) and isinstance(here, dict):
            yield from _differences(there, here, f"{place}.")
        elif isinstance(there, list) and isinstance(here, list):
            yield from (
                f"{place} has {v}, expected no such entry; {_AGAIN}" for v in _not_in(there, here)
            )
            yield from (f"{place} has no {v}, expected it; {_AGAIN}" for v in _not_in(here, there))
        elif there != here or (key in actual) != (key in expected):
            got = _brief(there) if key in actual else "missing"
            wanted = _brief(here) if key in expected else "no such key"
            yield f"{place} is {got}, expected {wanted}; {_AGAIN}"


def _not_in(some: Iterable[Any], others: Iterable[Any]) -> Iterator[str]:
    texts = {*map(_brief, others)}
    return (text for text in map(_brief, some) if text not in texts)


def _brief(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return shown(text if len(text) <= 200 else text[:197] + "...")
