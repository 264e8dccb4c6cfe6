"""What a conversion will do, what it did, and how two checkpoints differ, as data. No JAX."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from qtoolkit.checkpoints._checkpoint import Tensor
from qtoolkit.checkpoints._safetensors import in_data_order
from qtoolkit.checkpoints._tensors import Entry, shown
from qtoolkit.checkpoints.layouts import Encoding, Scheme
from qtoolkit.checkpoints.layouts._layout import HIGH_PRECISION
from qtoolkit.formats import BlockFormat, Format, Rules


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """What is done to one tensor.

    Attributes:
      source: The tensor in the source, dequantized if the source is quantized.
      action: "quantize"; "cast", rounded to another dtype of high precision; or "keep", copied.
      reason: Why it is not quantized; empty if it is.
      dtype: The dtype of its codes, or else of the tensor, in the target, as safetensors spells it.
      spec: The format to which it is quantized or cast; None if it is copied.
      encoding: How it is stored; None if it is not quantized or has no scale.
      scheme: The scheme of the layout; None in the same cases.
      group: A key that tensors with a common tensor scale share; "" if it has its own scale.
      target: Its name in the target, if that is another one and `encoding` does not say it.
    """

    source: Tensor
    action: Literal["quantize", "cast", "keep"]
    reason: str = ""
    dtype: str
    spec: BlockFormat | None = None
    encoding: Encoding | None = None
    scheme: Scheme | None = None
    group: str = ""
    target: str = ""

    @classmethod
    def quantized(
        cls, source: Tensor, encoding: Encoding, scheme: Scheme, group: str = ""
    ) -> "TensorPlan":
        """A weight that is quantized with scales."""
        return cls(
            source=source,
            action="quantize",
            dtype=encoding.codes.dtype,
            spec=encoding.spec,
            encoding=encoding,
            scheme=scheme,
            group=group,
        )

    @classmethod
    def unquantized(cls, source: Tensor, dtype: str, reason: str = "") -> "TensorPlan":
        """A tensor that is copied; or cast, if the dtype is another one."""
        if dtype == source.dtype:
            return cls(source=source, action="keep", reason=reason, dtype=dtype)
        spec = BlockFormat.tensor(HIGH_PRECISION[dtype], scale=None)
        return cls(source=source, action="cast", reason=reason, dtype=dtype, spec=spec)

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def format(self) -> Format | None:
        """The element format; None where it is copied."""
        return None if self.spec is None else self.spec.element

    @property
    def format_name(self) -> str:
        """The name of the format to which it is quantized; "" if it is not."""
        if self.scheme is not None and self.scheme.is_named:
            return self.scheme.format
        return self.format.name if self.action == "quantize" and self.format else ""

    @functools.cached_property
    def entries(self) -> tuple[Entry, ...]:
        """The tensors of the target that are written for it: name, dtype and shape of each."""
        if self.encoding is not None:
            return self.encoding.entries
        return (Entry(self.target or self.name, self.dtype, self.source.shape),)

    @property
    def has_scales(self) -> bool:
        return self.encoding is not None and self.encoding.quantizer is None

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of what is written for it."""
        return sum(entry.nbytes for entry in self.entries)

    def report(self, **measured: Any) -> "TensorReport":
        """What is done to it, with what was measured."""
        return TensorReport(
            name=self.name,
            action=self.action,
            reason=self.reason,
            dtype=self.dtype,
            format=self.format_name,
            bytes_before=self.source.stored_nbytes,
            bytes_after=self.nbytes,
            **measured,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is done to a checkpoint.

    Attributes:
      layout: The name of the layout.
      format: The format to which tensors are quantized, or the rules that say so.
      scaling: "tensor", "channel" or "block"; "none" if the format's scales have no such word; of
        several schemes their words, with commas between them.
      tensors: One plan for each tensor of the source, in the order of its data.
      metadata: The metadata of the target: that of the source, plus a summary under "qtoolkit".
      quantization_config: Written to config.json for loaders; empty: nothing is written.
      files: Further JSON files, by name.
      dequantizes: The layout of a quantized source; "" if the source is not quantized.
      caution: What a loader of the layout is known to misread, and what of the source belongs to a
        weight by its name and is read as no part of it; "" if nothing.
      header: The gguf package's writer of a GGUF file, which knows what is in it besides
        numbers; None for safetensors.
    """

    layout: str
    format: Format | BlockFormat | Scheme | Rules[Any] | None
    scaling: str
    tensors: tuple[TensorPlan, ...]
    metadata: Mapping[str, str]
    quantization_config: Mapping[str, Any]
    files: Mapping[str, Any]
    dequantizes: str = ""
    caution: str = ""
    header: Any = None

    @property
    def outputs(self) -> tuple[Entry, ...]:
        """Every tensor of the target, in the order of their data in one file."""
        return in_data_order(entry for tensor in self.tensors for entry in tensor.entries)

    def report(
        self,
        source: object,
        target: object,
        tensors: "Sequence[TensorReport] | None" = None,
        left: Sequence[str] = (),
    ) -> "Report":
        """The report of the conversion; without `tensors` nothing of it is measured yet."""
        if tensors is None:
            tensors = [tensor.report() for tensor in self.tensors]
        return Report(
            source=str(source),
            target=str(target),
            layout=self.layout,
            format=self.format_names,
            scaling=self.scaling,
            dequantized=self.dequantizes,
            loads_nowhere=self.loads_nowhere,
            quantization_config=self.quantization_config,
            caution=self.caution,
            left=tuple(left),
            tensors=tuple(tensors),
        )

    @property
    def loads_nowhere(self) -> bool:
        """Whether no loader of models can read the weights: codes that no config describes."""
        is_told = self.header is not None or self.quantization_config
        return not is_told and any(tensor.encoding is not None for tensor in self.tensors)

    @property
    def format_names(self) -> str:
        """What tensors are quantized to, with commas between: "e4m3fn", "nothing"."""
        found = dict.fromkeys(
            # Unique ones first: there are few, and finding the name of a format takes long.
            tensor.scheme or tensor.spec
            for tensor in self.tensors
            if tensor.spec is not None and tensor.action == "quantize"
        )
        used = dict.fromkeys(
            x.format if isinstance(x, Scheme) else x.element.name for x in found if x is not None
        )
        if not used and isinstance(self.format, Format | BlockFormat | Scheme):
            return self.format.name
        return ", ".join(used) or "nothing"


# Called after each piece of work with (name of the tensor, amount done, amount in all).
Progress = Callable[[str, int, int], None]


def with_progress(tensors: Iterable[Tensor], progress: Progress | None) -> Iterator[Tensor]:
    """Yields tensors, and reports after each that it is done."""
    tensors = list(tensors)
    done, total = 0, sum(tensor.nbytes for tensor in tensors)
    for tensor in tensors:
        yield tensor
        done += tensor.nbytes
        if progress is not None:
            progress(shown(tensor.name), done, total)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorReport:
    """What was done to one tensor.

    Attributes:
      name: The name of the tensor in the source.
      action: "quantize"; "cast", rounded to another dtype of high precision; or "keep", copied.
      reason: Why it was not quantized; empty if it was.
      dtype: Its dtype in the target, as safetensors spells it.
      format: The format to which it was quantized; empty if it was not.
      bytes_before, bytes_after: The size of its data; after the conversion with its scales.
      max_scale: The largest of its scales; None if it has none.
      sqnr_db: 10 log10(sum x^2 / sum (x - value)^2) over its finite elements, value being what
        `dequantize` gives; infinite if exact; None if it was copied, is empty or all zero.
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
      layout: The layout of the target, as `qtoolkit layouts` lists it; "GGUF" of such a file.
      format: The format to which tensors were quantized; with rules, several names with commas
        between them, or "nothing".
      scaling: The word for the scales; "none" if there are no scales or the format implies them; of
        several schemes their words, with commas between them.
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
      caution: What a loader of the layout is known to misread, and what of the source belongs to a
        weight by its name and is read as no part of it; "" if nothing.
      tensors: One report for each tensor, in the order of the source's data.
    """

    source: str
    target: str
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
            "kept_share": self.kept_share,
            "mean_sqnr_db": self.mean_sqnr_db,
        }
        return json.dumps(_finite(data), indent=2)

    @property
    def kept_share(self) -> float:
        """The share of the source, by bytes, that is not quantized."""
        return sum(tensor.bytes_before for tensor in self.kept) / max(self.bytes_before, 1)

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorComparison:
    """How a tensor b differs from a.

    Attributes:
      name: The name of the tensor.
      format: The format to which b is quantized, else its dtype.
      size: The number of elements.
      equal: Whether all values are the same; for tensors that are no floats, all bytes.
      sqnr_db: 10 log10(sum a^2 / sum (a - b)^2) over the elements that are finite in both; infinite
        if these are equal, None if a is zero in all of them, a sum overflows float64, or the
        tensors are no floats.
      max_error: The largest |a - b| of the same elements; None if the tensors are no floats.
      saturated: The share of elements that were clamped: the code in b is the largest, its
        negative or the lowest, and |a| exceeds |b| by more than half of the last step. None where b
        is not quantized.
      flushed: The share of the elements of a other than zero that are zero in b; None likewise.
      nonfinite: How many elements are NaN or infinite in a or b.
    """

    name: str
    format: str
    size: int
    equal: bool
    sqnr_db: float | None = None
    max_error: float | None = None
    saturated: float | None = None
    flushed: float | None = None
    nonfinite: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointComparison:
    """How a checkpoint b differs from a.

    Attributes:
      a, b: The paths of the two.
      tensors: The comparison of each tensor that both have, in the order of a.
      only_a, only_b: Names of tensors that only one of them has.
    """

    a: str
    b: str
    tensors: tuple[TensorComparison, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether both hold the same tensors with the same values."""
        same = all(tensor.equal for tensor in self.tensors)
        return same and not self.only_a and not self.only_b

    def to_json(self) -> str:
        """Everything as one JSON object; of equal tensors the SQNR, infinity, becomes null."""
        return json.dumps(_finite(dataclasses.asdict(self) | {"equal": self.equal}), indent=2)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
