"""The report of a conversion. No JAX here."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

from qtoolkit.checkpoints._header import TensorInfo, shown
from qtoolkit.checkpoints._plan import ContainerName

# Called after each piece of work with (name of the tensor, amount done, amount in all).
Progress = Callable[[str, int, int], None]


def followed(infos: Iterable[TensorInfo], progress: Progress | None) -> Iterator[TensorInfo]:
    """Yields tensors; when the next one is asked for, it says that one is done."""
    infos = list(infos)
    done, total = 0, sum(info.nbytes for info in infos)
    for info in infos:
        yield info
        done += info.nbytes
        if progress is not None:
            progress(shown(info.name), done, total)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorReport:
    """What was done to one tensor.

    Attributes:
      name: The name of the tensor in the source.
      action: "quantize"; "cast", rounded to another wide dtype; or "keep".
      reason: Why it was not quantized; empty if it was.
      dtype: Its dtype in the target, as safetensors spells it.
      format: The format to which it was quantized; empty if it was not.
      bytes_before, bytes_after: The size of its data; after the conversion with its scales.
      max_scale: The largest of its scales; None if it has none.
      sqnr_db: 10 log10(sum x^2 / sum (x - value)^2) over its finite elements, value being what
        `dequantize` gives; infinite if exact; None if it was kept, is empty or all zero.
      nonfinite: How many elements are NaN or infinite; counted in float64, float32, float16 and
        bfloat16.
      overflowed: How many finite elements exceeded the largest number of the float16 or bfloat16 to
        which the tensor was rounded, and became that number.
    """

    name: str
    action: Literal["quantize", "cast", "keep"]
    reason: str = ""
    dtype: str = ""
    format: str = ""
    bytes_before: int
    bytes_after: int
    max_scale: float | None = None
    sqnr_db: float | None = None
    nonfinite: int = 0
    overflowed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What `convert` has done.

    Attributes:
      source, target: The two files or folders.
      container: What holds the tensors of the target: "safetensors" or "orbax".
      layout: The layout of the target: a name in `LAYOUTS`.
      format: The format to which tensors were quantized; with rules, several names with commas
        between them, or "nothing".
      scaling: The word for the scales; "none" if there are no scales or the format implies them.
      dequantized: The layout of a quantized source; "" if the source was not quantized.
      files: The names of the files in a target folder, or of those that a shard has to write; empty
        if the target is a file.
      shard: Which part of a conversion this is, "0/8"; empty if it is all of it.
      resumed: The names in `files` that an earlier run had written already.
      left: What was in the source and was not copied: hidden files, other weights, scales of
        activations and caches.
      loads_nowhere: Whether no loader of models can read the weights as they are. The config of a
        target folder is then called qtoolkit_config.json instead of config.json.
      quantization_config: What config.json says to loaders. If the target is a single file, loaders
        need it in the config.json that is used with it.
      caution: What a loader of the layout is known to misread; "" if nothing.
      tensors: One report for each tensor, in the order of the source's data.
    """

    source: str
    target: str
    container: ContainerName = "safetensors"
    layout: str = "plain"
    format: str
    scaling: str
    dequantized: str = ""
    files: tuple[str, ...] = ()
    shard: str = ""
    resumed: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    loads_nowhere: bool = False
    quantization_config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    caution: str = ""
    tensors: tuple[TensorReport, ...]

    @property
    def quantized(self) -> tuple[TensorReport, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.action == "quantize")

    @property
    def kept(self) -> tuple[TensorReport, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.action != "quantize")

    def to_json(self) -> str:
        """Everything as one JSON object. Numbers that JSON lacks, such as Infinity, become null."""
        data = dataclasses.asdict(self) | {
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "mean_sqnr_db": self.mean_sqnr_db,
        }
        return json.dumps(_finite(data), indent=2)

    @property
    def bytes_before(self) -> int:
        return sum(tensor.bytes_before for tensor in self.tensors)

    @property
    def bytes_after(self) -> int:
        return sum(tensor.bytes_after for tensor in self.tensors)

    @property
    def nonfinite(self) -> int:
        return sum(tensor.nonfinite for tensor in self.tensors)

    @property
    def overflowed(self) -> int:
        return sum(tensor.overflowed for tensor in self.tensors)

    @property
    def mean_sqnr_db(self) -> float | None:
        """Mean SQNR of the tensors without exact ones; infinite if all are exact; None if none has
        an SQNR.
        """
        known = [tensor.sqnr_db for tensor in self.tensors if tensor.sqnr_db is not None]
        lossy = [sqnr for sqnr in known if math.isfinite(sqnr)] or known
        return sum(lossy) / len(lossy) if lossy else None


def decibels(signal: float, noise: float) -> float | None:
    """Ratio of two sums of squares in dB; None where there is no signal to compare."""
    if not (signal > 0 and math.isfinite(signal) and math.isfinite(noise)):
        return None
    return 10 * math.log10(signal / noise) if noise > 0 else math.inf


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
