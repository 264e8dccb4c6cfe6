"""The plan of a conversion: what is done to each tensor. Data only, no JAX here."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal

from qtoolkit.checkpoints._base import StoredAs
from qtoolkit.checkpoints._header import TensorInfo
from qtoolkit.checkpoints._header import layout as placed
from qtoolkit.checkpoints._stored import Entry, Stored
from qtoolkit.checkpoints._targets import is_named
from qtoolkit.checkpoints.layouts import Scheme
from qtoolkit.formats import BlockFormat, Format, Rules

ContainerName = Literal["safetensors", "orbax"]  # what holds the tensors of a target


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """What is done to one tensor.

    Attributes:
      source: The tensor in the source, dequantized if the source is quantized.
      action: "quantize"; "cast", rounded to another wide dtype; or "keep", copied unchanged.
      reason: Why it is not quantized; empty if it is.
      dtype: The dtype of its codes, or else of the tensor, in the target, as safetensors spells it.
      spec: The format to which it is quantized or cast; None if it is kept.
      stored: How it is stored; None if it is not quantized or has no scale.
      scheme: The scheme of the layout; None in the same cases.
      group: A key that tensors with a common tensor scale share; "" if it has its own scale.
    """

    source: TensorInfo
    action: Literal["quantize", "cast", "keep"]
    reason: str
    dtype: str
    spec: BlockFormat | None = None
    stored: Stored | None = None
    scheme: Scheme | None = None
    group: str = ""

    @classmethod
    def quantized(
        cls, source: TensorInfo, stored: Stored, scheme: Scheme, group: str = ""
    ) -> "TensorPlan":
        """A weight that is quantized with scales."""
        return cls(
            source=source,
            action="quantize",
            reason="",
            dtype=stored.codes.dtype,
            spec=stored.spec,
            stored=stored,
            scheme=scheme,
            group=group,
        )

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def format(self) -> Format | None:
        """The element format; None where it is kept."""
        return None if self.spec is None else self.spec.element

    @functools.cached_property
    def entries(self) -> tuple[Entry, ...]:
        """The tensors of the target that are written for it: name, dtype and shape of each."""
        if self.stored is not None:
            return self.stored.entries
        return (Entry(self.name, self.dtype, self.source.shape),)

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of what is written for it."""
        return sum(entry.nbytes for entry in self.entries)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is done to a checkpoint.

    Attributes:
      layout: The name of the layout.
      format: The format to which tensors are quantized, or the rules that say so.
      scaling: "tensor", "channel" or "block"; "none" if the format's scales have no such word.
      tensors: One plan for each tensor of the source, in the order of its data.
      metadata: The metadata of the target: that of the source, plus a summary under "qtoolkit".
      quantization_config: Written to config.json for loaders; empty: nothing is written.
      files: Further JSON files, by name.
      dequantizes: The layout of a quantized source; "" if the source is not quantized.
      stored_as: How its quantized tensors are stored, by name.
      caution: What one of the layout's loaders is known to misread; "" if nothing.
    """

    layout: str
    format: Format | BlockFormat | Rules[Any] | None
    scaling: str
    tensors: tuple[TensorPlan, ...]
    metadata: Mapping[str, str]
    quantization_config: Mapping[str, Any]
    files: Mapping[str, Any]
    dequantizes: str = ""
    stored_as: Mapping[str, StoredAs] = dataclasses.field(default_factory=dict)
    caution: str = ""

    def before(self, tensor: TensorPlan) -> StoredAs:
        """How one of `tensors` is stored in the source."""
        source = tensor.source
        return self.stored_as.get(source.name) or StoredAs(source.dtype, source.nbytes)

    @property
    def outputs(self) -> tuple[TensorInfo, ...]:
        """Every tensor of the target, placed in one file."""
        return placed(entry for tensor in self.tensors for entry in tensor.entries)

    @property
    def loads_nowhere(self) -> bool:
        """Whether no loader of models can read the weights: codes that no config describes."""
        return not self.quantization_config and any(t.stored is not None for t in self.tensors)

    @property
    def format_names(self) -> str:
        """What tensors are quantized to, with commas between: "e4m3fn", "nothing"."""
        specs = dict.fromkeys(
            # Unique ones first: there are few, and finding the name of a format takes long.
            (tensor.scheme.spec if tensor.scheme else tensor.spec, tensor.scheme is not None)
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
