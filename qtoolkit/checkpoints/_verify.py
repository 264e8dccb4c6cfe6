"""Checks a converted checkpoint: plans and quantizes its source again and compares the bytes."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from qtoolkit.checkpoints._compare import opened
from qtoolkit.checkpoints._experts import split_alike
from qtoolkit.checkpoints._loading import config_problems
from qtoolkit.checkpoints._paths import Path, check_path
from qtoolkit.checkpoints._produce import Production, Workers
from qtoolkit.checkpoints._report import Progress, TensorPlan, followed
from qtoolkit.checkpoints._tensors import NUMPY_DTYPES, Checkpoint, Tensor, shown
from qtoolkit.checkpoints._values import Values
from qtoolkit.checkpoints.layouts import LAYOUTS, Encoding
from qtoolkit.checkpoints.layouts._layout import WIDE
from qtoolkit.formats import DEEPSEEK_128X128, E4M3FN, FLOAT32, BlockFormat
from qtoolkit.formats import format as resolve


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
    """Quantizes `src` again as `converted` is quantized, and compares every code and scale.

    Headers and index are checked as they are opened. Each tensor of `src` must be there: unchanged,
    rounded to another wide dtype, or quantized, its codes and scales being those of
    `qtoolkit.quantize`, in layout compressed-tensors by that package's rules of scales. Static
    input scales must be there if the config says so, and be finite and above 0; what numbers the
    calibration gave cannot be checked. If `convert` wrote the checkpoint, config.json and
    hf_quant_config.json must say of quantization what it writes for these weights. If another
    program did, config.json must only say that weights are quantized, and must not list one of
    these by name as ignored. Other files are not compared. Nothing is written; memory is a few
    chunks.

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
    check_path(src, "src")
    check_path(converted, "converted")
    with opened(src) as source, opened(converted) as target:
        source, target = split_alike(source, target)
        problems = [*config_problems(source, target), *_differences(source, target, progress)] + [
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


def _differences(
    source: Checkpoint, target: Checkpoint, progress: Progress | None
) -> Iterator[str]:
    """A line for each tensor of the source that the target has not as the conversion gives it."""
    plans = {t.name: _plan(t, target) for t in source.tensors.values()}
    planned = [p for p in plans.values() if isinstance(p, TensorPlan)]
    production = Production(planned, Workers(), stored=source.stored)
    for tensor in followed(source.tensors.values(), progress):
        plan = plans[tensor.name]
        if isinstance(plan, str):
            yield f"{shown(tensor.name)}: {plan}"
        elif tensor.size and (difference := _difference(production, plan, target)):
            yield f"{shown(tensor.name)}: {difference}"


def _plan(tensor: Tensor, target: Checkpoint) -> TensorPlan | str:
    """What the conversion did with a tensor; or what is wrong if it did no such thing."""
    found = target.everything.get(tensor.name)
    if found is None or found.shape != tensor.shape:
        got = "is missing" if found is None else f"shape {list(found.shape)}"
        return f"{got}, expected shape {list(tensor.shape)}"
    if found.encoding is not None:
        if not found.encoding.is_written:
            return (
                f"in layout {target.layout} as {found.encoding.spec.name}, which is read, not "
                "written, expected codes that can be made again; measure it with `qtoolkit compare`"
            )
        encoding = _computed(found.encoding, target)
        return TensorPlan(
            source=tensor,
            action="quantize",
            reason="",
            dtype=encoding.codes.dtype,
            spec=encoding.spec_as_stored,
            encoding=encoding,
            group=_second_scale(encoding, target),
        )
    if found.dtype == tensor.dtype:
        return TensorPlan(source=tensor, action="keep", reason="", dtype=tensor.dtype)
    if tensor.dtype in WIDE and found.dtype in WIDE:
        spec = BlockFormat.tensor(resolve(NUMPY_DTYPES[found.dtype]), scale=None)
        return TensorPlan(source=tensor, action="cast", reason="", dtype=found.dtype, spec=spec)
    return f"dtype {found.dtype}, expected {tensor.dtype}"


def _computed(encoding: Encoding, target: Checkpoint) -> Encoding:
    """The encoding, with the rules of scales of its layout.

    And with DeepSeek's least amax of 1e-4 if the scales show it. No file says whether it was
    used. If the least scale is exactly 1e-4 / 448, it was: blocks with a smaller amax have that
    scale then.
    """
    spec = encoding.spec
    if target.layout in LAYOUTS:
        spec = LAYOUTS[target.layout].computed(spec)
    encoding = dataclasses.replace(encoding, spec=spec)
    least = np.float32(DEEPSEEK_128X128.amax_epsilon) / np.float32(DEEPSEEK_128X128.largest)
    if len(spec.block) != 2 or (spec.element, spec.scale) != (E4M3FN, FLOAT32):
        return encoding
    scale, _ = Values(encoding, target.stored).scales()
    if scale is None or np.nanmin(scale, initial=np.inf) != least:
        return encoding
    spec = dataclasses.replace(spec, amax_epsilon=DEEPSEEK_128X128.amax_epsilon)
    return dataclasses.replace(encoding, spec=spec)


def _second_scale(encoding: Encoding, target: Checkpoint) -> str:
    """The bytes of its one tensor scale: weights with an equal one may share it. Else ""."""
    entry = encoding.tensor_scale
    if entry is None or entry.nbytes > 4:
        return ""
    data = bytearray(entry.nbytes)
    target.stored[entry.name].read_into(0, memoryview(data))
    return data.hex()


def _difference(production: Production, plan: TensorPlan, target: Checkpoint) -> str:
    """Where the target first differs from what is produced again; "" where it does not."""
    name = plan.name
    places: dict[str, int] = {}
    for entry, array in production.chunks([plan]):
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
