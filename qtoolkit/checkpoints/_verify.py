"""Checks a converted checkpoint: plans and quantizes its source again and compares the bytes.

`convert` stores its arguments with the weights, so the same plan is made again, and the tensors and
config.json that it writes are compared with what is there. Other programs store no arguments: of
their checkpoints only the codes and scales of weights are compared, with those that the format of
each weight gives.
"""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from qtoolkit.checkpoints import _storage as storage
from qtoolkit.checkpoints._arguments import PlanOptions
from qtoolkit.checkpoints._checkpoint import Checkpoint, Tensor
from qtoolkit.checkpoints._containers import open_source
from qtoolkit.checkpoints._decode import check_explained, decode_weights, own_metadata
from qtoolkit.checkpoints._experts import split_alike
from qtoolkit.checkpoints._folder import CONFIG, read_json
from qtoolkit.checkpoints._gguf import LAYOUT as GGUF
from qtoolkit.checkpoints._gguf_write import plan_gguf
from qtoolkit.checkpoints._plan import make_plan
from qtoolkit.checkpoints._produce import Production, Workers
from qtoolkit.checkpoints._report import Plan, Progress, TensorPlan
from qtoolkit.checkpoints._storage import Path, join
from qtoolkit.checkpoints._target import json_files
from qtoolkit.checkpoints._tensors import CheckpointError, shown
from qtoolkit.checkpoints.layouts import LAYOUTS, Encoding
from qtoolkit.checkpoints.layouts._layout import HIGH_PRECISION
from qtoolkit.formats import DEEPSEEK_128X128, E4M3FN, FLOAT32

_AGAIN = "convert it again"
_UNCOMPARED = ("producer",)  # in a config: the version of a program


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verification:
    """What `verify` found.

    Attributes:
      source, converted: The two paths.
      tensors, quantized: How many tensors were compared, and how many of them are quantized.
      codes_only: Whether nothing but codes and scales of weights was compared, because another
        program made the checkpoint, which stores no arguments of `convert`.
      problems: A line for each difference; empty where all is as it should be.
    """

    source: str
    converted: str
    tensors: int
    quantized: int
    codes_only: bool
    problems: tuple[str, ...]


def verify(src: Path, converted: Path, *, progress: Progress | None = None) -> Verification:
    """Convert `src` again as `converted` was converted, and compare all bytes. Nothing is written.

    `convert` stores its arguments in the metadata of the weights. Planned again with them, each
    tensor must have the same dtype, shape and bytes, static input scales too, and config.json the
    same content. Other files, and the metadata and tokenizer in GGUF, are not compared. Memory is a
    few slabs.

    A checkpoint of another program has no such arguments. Then only weights are compared: each
    tensor of `src` must be there, unchanged, rounded to another dtype of high precision, or
    quantized with the codes and scales of `qtoolkit.quantize`; in layout compressed-tensors scales
    follow that package's rules. `codes_only` says so.

    Args:
      src: The checkpoint that was converted: a folder or a file.
      converted: The result, of any program that quantizes in one of the layouts.
      progress: Called with (name, bytes compared, bytes in all).

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
    with open_source(src) as opened, open_source(converted) as target:
        source = decode_weights(opened)
        record = own_metadata(target)
        if record.get("arguments") is None:
            check_explained(source)
            tensors, quantized, problems = _by_codes(source, target, progress)
        else:
            tensors, quantized, problems = _by_arguments(source, target, record, progress)
        return Verification(
            source=str(src),
            converted=str(converted),
            tensors=tensors,
            quantized=quantized,
            codes_only=record.get("arguments") is None,
            problems=tuple(problems),
        )


# Checkpoints of `convert`.


def _by_arguments(
    source: Checkpoint, target: Checkpoint, record: Mapping[str, Any], progress: Progress | None
) -> tuple[int, int, list[str]]:
    """How many tensors were compared, how many of them are quantized, and what differs."""
    stored = target.raw or target.tensors
    try:
        planned = plan_gguf if record.get("layout") == GGUF else make_plan
        plan = planned(source, PlanOptions.from_json(record["arguments"]))
    except CheckpointError as error:
        return 0, 0, [f"planned again as it was converted: {error}"]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{target.path}: the arguments of its conversion, in its metadata, cannot be read "
            f"({type(error).__name__}: {shown(str(error))}); {_AGAIN}"
        ) from error
    expected = {entry.name for tensor in plan.tensors for entry in tensor.entries}
    problems = [*_config_problems(source, target, plan)]
    problems += _tensor_problems(plan.tensors, source, stored, progress)
    problems += [
        f"{shown(name)}: is there, expected no such tensor; {_AGAIN}"
        for name in stored
        if name not in expected
    ]
    present = [t for t in plan.tensors if all(e.name in stored for e in t.entries)]
    return len(present), sum(t.encoding is not None for t in present), problems


def _config_problems(source: Checkpoint, target: Checkpoint, plan: Plan) -> Iterator[str]:
    """A line for each difference of the JSON files that loaders read."""
    is_there = target.folder is not None and storage.kind_at(join(target.path, CONFIG)) == "file"
    if plan.loads_nowhere and is_there:
        # transformers then takes codes for weights: SmolLM2-135M in E4M3 has a perplexity of 17
        # million instead of 18.
        yield f"{CONFIG}: is there, expected none: loaders take codes for weights; remove it"
    for name, content in json_files(source, plan).items() if target.folder is not None else ():
        if storage.kind_at(join(target.path, name)) == "file":
            yield from _differences(read_json(join(target.path, name)), content, f"{name}: ")
        else:
            yield f"{name}: is missing, expected what layout {plan.layout} has; {_AGAIN}"


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


# Checkpoints of other programs.


def _by_codes(
    source: Checkpoint, target: Checkpoint, progress: Progress | None
) -> tuple[int, int, list[str]]:
    """As `_by_arguments`; the plan is what the codes that are there say."""
    target = decode_weights(target)
    check_explained(target)
    source, target = split_alike(source, target)
    plans = {tensor.name: _plan_by_codes(tensor, target) for tensor in source.tensors.values()}
    planned = [plan for plan in plans.values() if isinstance(plan, TensorPlan)]
    stored = {
        entry.name: (target.all_tensors if plan.encoding is None else target.raw)[entry.name]
        for plan in planned
        for entry in plan.entries
    }
    problems = [f"{shown(n)}: {plan}" for n, plan in plans.items() if isinstance(plan, str)]
    problems += _tensor_problems(planned, source, stored, progress)
    problems += [
        f"{shown(name)}: is not in {shown(str(source.path))}"
        for name in target.tensors
        if name not in source.tensors
    ]
    if problems and source.encodings and not target.encodings:
        first, second = shown(str(source.path)), shown(str(target.path))
        hint = "expected the source first: verify SOURCE CONVERTED"
        problems = [f"{first} is quantized, {second} is not, {hint}"]
    present = [name for name in source.tensors if name in target.all_tensors]
    return len(present), sum(name in source.tensors for name in target.encodings), problems


def _plan_by_codes(tensor: Tensor, target: Checkpoint) -> TensorPlan | str:
    """What the conversion did with a tensor; or what is wrong if it did no such thing."""
    converted = target.all_tensors.get(tensor.name)
    if converted is None or converted.shape != tensor.shape:
        got = "is missing" if converted is None else f"shape {list(converted.shape)}"
        return f"{got}, expected shape {list(tensor.shape)}"
    if converted.encoding is not None:
        if not converted.encoding.is_written:
            return (
                f"in layout {target.layout} as {converted.encoding.spec.name}, which is read, not "
                "written, expected codes that can be made again; measure it with `qtoolkit compare`"
            )
        encoding = _with_scale_rules(converted, converted.encoding, target.layout)
        entry, group = encoding.tensor_scale, ""
        if entry is not None and entry.nbytes == 4:  # weights with an equal one may share it
            group = target.raw[entry.name].read().tobytes().hex()
        return TensorPlan(
            source=tensor,
            action="quantize",
            dtype=encoding.codes.dtype,
            spec=encoding.spec,
            encoding=dataclasses.replace(encoding, constants=()),
            group=group,
        )
    if converted.is_dequantized:
        return (
            "is a part of a quantized stack of experts, expected experts as the source has them; "
            "measure it with `qtoolkit compare`"
        )
    if converted.dtype != tensor.dtype and not HIGH_PRECISION.keys() >= {
        converted.dtype,
        tensor.dtype,
    }:
        return f"dtype {converted.dtype}, expected {tensor.dtype}"
    return TensorPlan.unquantized(tensor, converted.dtype)


def _with_scale_rules(converted: Tensor, encoding: Encoding, layout: str) -> Encoding:
    """The encoding of a weight, with the rules of scales of its layout."""
    spec = encoding.spec
    if layout in LAYOUTS:
        spec = LAYOUTS[layout].with_scale_rules(spec)
    encoding = dataclasses.replace(encoding, spec=spec)
    # No file says whether DeepSeek's least amax of 1e-4 was used. If the least scale is exactly
    # 1e-4 / 448, it was: blocks with a smaller amax have that scale then.
    least = np.float32(DEEPSEEK_128X128.amax_epsilon) / np.float32(DEEPSEEK_128X128.largest)
    if len(spec.block) != 2 or (spec.element, spec.scale) != (E4M3FN, FLOAT32):
        return encoding
    scale, _ = converted.weight.scales
    if scale is None or np.nanmin(scale, initial=np.inf) != least:
        return encoding
    spec = dataclasses.replace(spec, amax_epsilon=DEEPSEEK_128X128.amax_epsilon)
    return dataclasses.replace(encoding, spec=spec)


# Bytes.


def _tensor_problems(
    planned: Iterable[TensorPlan],
    source: Checkpoint,
    stored: Mapping[str, Tensor],
    progress: Progress | None,
) -> list[str]:
    """A line for each planned tensor that is not stored as the conversion gives it."""
    planned = [*planned]
    problems = {plan.name: _header_problem(plan, stored) for plan in planned}
    # All that is planned is given: some share a tensor scale.
    production = Production(planned, Workers(), progress)
    written = [plan for plan in planned if not problems[plan.name]]
    production.total = sum(plan.nbytes for plan in written)
    plan_of = {entry.name: plan for plan in written for entry in plan.entries}
    places = dict.fromkeys(plan_of, 0)
    for entry, data in production.chunks(written):
        name, start = plan_of[entry].name, places[entry]
        wanted = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        places[entry] += len(wanted)
        if not problems[name] and (found := _byte_problem(stored[entry], start, wanted)):
            problems[name] = ("" if entry == name else f"{shown(entry)}: ") + found
    return [f"{shown(name)}: {problem}" for name, problem in problems.items() if problem]


def _header_problem(plan: TensorPlan, stored: Mapping[str, Tensor]) -> str:
    """What dtypes and shapes say of the entries of a tensor; "" if they are as planned."""
    for entry in plan.entries:
        there = stored.get(entry.name)
        which = "" if entry.name == plan.name else f"{shown(entry.name)}: "
        if there is None:
            return f"{which}is missing, expected {entry}; {_AGAIN}"
        if there.entry[1:] != entry[1:]:
            return f"{which}{there.entry}, expected {entry}; {_AGAIN}"
    return ""


def _byte_problem(stored: Tensor, start: int, wanted: np.ndarray) -> str:
    """Where stored bytes differ from those that the conversion gives; "" where they do not."""
    got = np.empty_like(wanted)
    if not len(got):
        return ""
    stored.read_into(start, got.data)
    differ = np.flatnonzero(got != wanted)
    if not len(differ):
        return ""
    at = int(differ[0])
    return f"byte {start + at:,} is {got[at]}, expected {wanted[at]}; {_AGAIN}"
