"""Reads, writes and quantizes checkpoints as a stream. JAX is imported only by what computes.

The way of a weight, file by file:

  _containers   opens a checkpoint; with `_safetensors`, `_folder` and `_orbax` it yields a
                `Checkpoint` of `Tensor`s, of which any elements can be read (`_tensors`)
  _decode       asks the layouts which weights are quantized, and how: an `Encoding` each; `_values`
                makes a `QArray`, or float32 numbers, of what an encoding describes; `_codes`
                refuses codes that no layout explains
  _experts      makes a weight of each expert where a tensor has all of a layer, and loaders of the
                target read them one by one
  _plan         decides what becomes of each tensor, by its name (`_roles`), header and format
                (`_formats`): a `Plan`; `_checks` refuses what loaders of the target would misread
  _target       says which files a target has, and refuses names by which something would be lost
  _produce      yields the bytes of planned tensors, slab by slab (`_slabs`): `_quantize` makes
                codes and scales, which are packed as the encoding of the target says
  _safetensors  writes them under a temporary name (`_writing`) and renames what is whole;
  _shards       does so for the files of a folder, in one process or many

`convert` and `dequantize_checkpoint` (`_convert`) are these steps in a row. `verify` plans and
quantizes again and compares the bytes. `compare` and `load` (`_load`, `_pytrees`) open and decode.
A layout knows headers only.
"""

import importlib
from typing import TYPE_CHECKING, Any

from qtoolkit._names import unknown
from qtoolkit.checkpoints._containers import open_source
from qtoolkit.checkpoints._formats import safetensors_dtype
from qtoolkit.checkpoints._load import dequantize, load, save
from qtoolkit.checkpoints._plan import make_plan
from qtoolkit.checkpoints._report import (
    Comparison,
    Plan,
    Report,
    TensorComparison,
    TensorPlan,
    TensorReport,
)
from qtoolkit.checkpoints._roles import DEFAULT_SKIP
from qtoolkit.checkpoints._safetensors import (
    SafetensorsFile,
    TensorInfo,
    layout,
    write_safetensors,
)
from qtoolkit.checkpoints._shards import finalize
from qtoolkit.checkpoints._tensors import CheckpointError
from qtoolkit.checkpoints.layouts import LAYOUTS, Layout

if TYPE_CHECKING:
    from qtoolkit.checkpoints._compare import compare
    from qtoolkit.checkpoints._convert import convert, dequantize_checkpoint
    from qtoolkit.checkpoints._verify import Verification, verify

__all__ = [
    "DEFAULT_SKIP",
    "LAYOUTS",
    "CheckpointError",
    "Comparison",
    "Layout",
    "Plan",
    "Report",
    "SafetensorsFile",
    "TensorComparison",
    "TensorInfo",
    "TensorPlan",
    "TensorReport",
    "Verification",
    "compare",
    "convert",
    "dequantize",
    "dequantize_checkpoint",
    "finalize",
    "layout",
    "load",
    "make_plan",
    "open_source",
    "safetensors_dtype",
    "save",
    "verify",
    "write_safetensors",
]


# Names whose modules import JAX, so they are imported on first use.
_COMPUTING = {
    "compare": "_compare",
    "convert": "_convert",
    "dequantize_checkpoint": "_convert",
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
