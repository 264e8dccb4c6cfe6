"""Reads, writes and quantizes checkpoints as a stream. JAX is imported only by what computes.

One direction: open -> plan -> quantize -> pack -> write. A weight has one word in each stage:

  Entry     a tensor as a header announces it: name, dtype, shape (`_tensors`)
  Tensor    what an open `Checkpoint` holds, of which any elements are read (`_checkpoint`). One
            that is quantized is read as float32: `_decode` asks the layouts for its `Encoding`
  Encoding  how files hold a quantized weight, as data (`layouts/`); a layout makes it, and knows
            headers only. `Tensor.weight` makes numbers, codes or a `QArray` of it (`_reader`)
  TensorPlan  the step that a tensor takes: keep, cast or quantize, with the encoding of the target
  QArray    a weight in memory, with its codes and scales: what `load` gives (`qtoolkit.QArray`)
  Slab      the part of a weight that is computed at once: whole blocks, or a part of one row of
            blocks (`_slabs`). A block is the elements that share a scale

The files, along the arrow:

  open      `_containers` says what a path is; `_safetensors`, `_folder`, `_gguf` and `_orbax`
            open it (`_storage`); `_decode` finds what is quantized, and refuses codes that no
            layout explains (by `_entry_names`); `_experts` splits stacks
  plan      `_plan`, by names (`_roles`), headers and formats (`_formats`); `_checks` and
            `_cautions` say what loaders of the target would misread; a `Plan` is data (`_report`),
            and its `PlanOptions` are stored with the weights (`_arguments`)
  quantize  `_produce` takes planned tensors slab by slab through `_quantize`, in threads
  pack      `_produce` packs codes and names entries, as the `Encoding` of the target says
  write     `_target` says which files there are; `_safetensors` writes one under a temporary name
            (`_writing`) and renames it when it is whole, `_shards` the files of a folder

GGUF as a target is the same arrow with another plan, by llama.cpp's rules, names and metadata
(`_gguf_write`, `_gguf_models`, `_gguf_vocab`), and another writer of a file.

`convert` and `dequantize_checkpoint` (`_convert`) are these steps in a row. `verify` takes them
again with the stored options and compares bytes; `compare` opens two and compares numbers.
`load` and `save` (`_load`, `_pytrees`) go between files and pytrees; `export` (`_export`) plans and
packs without a file.
"""

import importlib
from typing import TYPE_CHECKING, Any

from qtoolkit._names import unknown
from qtoolkit.checkpoints._load import dequantize, load, save
from qtoolkit.checkpoints._report import (
    CheckpointComparison,
    Plan,
    Report,
    TensorComparison,
    TensorPlan,
    TensorReport,
)
from qtoolkit.checkpoints._roles import DEFAULT_SKIP
from qtoolkit.checkpoints._shards import finalize
from qtoolkit.checkpoints._tensors import CheckpointError

if TYPE_CHECKING:
    from qtoolkit.checkpoints._compare import compare
    from qtoolkit.checkpoints._convert import convert, dequantize_checkpoint
    from qtoolkit.checkpoints._export import Export, export
    from qtoolkit.checkpoints._verify import Verification, verify

__all__ = [
    "DEFAULT_SKIP",
    "CheckpointComparison",
    "CheckpointError",
    "Export",
    "Plan",
    "Report",
    "TensorComparison",
    "TensorPlan",
    "TensorReport",
    "Verification",
    "compare",
    "convert",
    "dequantize",
    "dequantize_checkpoint",
    "export",
    "finalize",
    "load",
    "save",
    "verify",
]


# Names whose modules import JAX, so they are imported on first use.
_COMPUTING = {
    "compare": "_compare",
    "convert": "_convert",
    "dequantize_checkpoint": "_convert",
    "Export": "_export",
    "export": "_export",
    "verify": "_verify",
    "Verification": "_verify",
}


if not TYPE_CHECKING:  # with `__getattr__`, type checkers would accept every misspelled name

    def __getattr__(name: str) -> Any:
        if name in _COMPUTING:
            module = importlib.import_module(f"qtoolkit.checkpoints.{_COMPUTING[name]}")
            globals()[name] = getattr(module, name)  # so that `__getattr__` runs once per name
            return globals()[name]
        raise unknown("qtoolkit.checkpoints", name)


def __dir__() -> list[str]:
    return sorted(__all__)
