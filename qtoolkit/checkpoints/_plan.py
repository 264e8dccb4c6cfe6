"""What becomes of a checkpoint and of each of its tensors: data. No JAX here."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from qtoolkit.checkpoints._header import TensorInfo
from qtoolkit.checkpoints._header import layout as placed
from qtoolkit.checkpoints._stored import Entry, Stored
from qtoolkit.checkpoints._targets import is_named
from qtoolkit.checkpoints.layouts import Scheme
from qtoolkit.formats import BlockFormat, Format, Rules

ContainerName = Literal["safetensors", "orbax"]  # what holds the tensors of a target


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """What becomes of one tensor.

    Attributes:
      source: The tensor as the source has it; of a quantized source, dequantized.
      action: "quantize"; "cast", rounded to another wide dtype; or "keep", copied unchanged.
      reason: Why it is not quantized; empty where it is.
      dtype: Of its codes, or its own, in the target, as safetensors spells it.
      spec: What it is quantized or cast to; None where it is kept.
      stored: How it is stored; None where it is not quantized, or has no scale.
      scheme: The scheme of the layout; None likewise.
      group: What tensors of one tensor scale have in common; "" where it has a scale of its own.
    """

    source: TensorInfo
    action: Literal["quantize", "cast", "keep"]
    reason: str
    dtype: str
    spec: BlockFormat | None = None
    stored: Stored | None = None
    scheme: Scheme | None = None
    group: str = ""

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def format(self) -> Format | None:
        """The element format; None where it is kept."""
        return None if self.spec is None else self.spec.element

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Name, dtype and shape of what is written for it."""
        if self.stored is not None:
            return self.stored.entries
        return (Entry(self.name, self.dtype, self.source.shape),)

    @property
    def nbytes(self) -> int:
        """Bytes of what is written for it."""
        return sum(entry.nbytes for entry in self.entries)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What becomes of a checkpoint.

    Attributes:
      layout: Its name.
      format: What tensors are quantized to, or the rules that say so.
      scaling: "tensor", "channel" or "block"; "none" where no format has a word for its scales.
      tensors: One plan for each tensor of the source, in the order of its data.
      metadata: Of the target: the source's, and what was done under "qtoolkit".
      quantization_config: What loaders find in config.json; empty where they find nothing.
      files: Further JSON files, by name.
      dequantizes: The layout of a source that is quantized; "" where it is not.
      caution: What one of the layout's loaders is known to misread; "" where nothing is.
    """

    layout: str
    format: Format | BlockFormat | Rules[Any] | None
    scaling: str
    tensors: tuple[TensorPlan, ...]
    metadata: Mapping[str, str]
    quantization_config: Mapping[str, Any]
    files: Mapping[str, Any]
    dequantizes: str = ""
    caution: str = ""

    @property
    def outputs(self) -> tuple[TensorInfo, ...]:
        """Every tensor of the target, placed in one file."""
        return placed(entry for tensor in self.tensors for entry in tensor.entries)

    @property
    def loads_nowhere(self) -> bool:
        """Whether no loader of models reads the weights: codes that no config speaks of."""
        return not self.quantization_config and any(t.stored is not None for t in self.tensors)

    @property
    def format_names(self) -> str:
        """What tensors are quantized to, with commas between: "e4m3fn", "nothing"."""
        specs = dict.fromkeys(
            (tensor.spec, tensor.scheme is not None)  # few of them: a name takes long to find
            for tensor in self.tensors
            if tensor.spec is not None and tensor.action == "quantize"
        )
        used = dict.fromkeys(
            (spec if has_scheme and is_named(spec) else spec.element).name
            for spec, has_scheme in specs
        )
        if not used and isinstance(self.format, Format | BlockFormat):
            return self.format.name
        return ", ".join(used) or "nothing"
