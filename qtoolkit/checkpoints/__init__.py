"""Checkpoints read, written and quantized as a stream. JAX loads with `convert` only."""

from typing import TYPE_CHECKING, Any

from qtoolkit.checkpoints._header import CheckpointError, TensorInfo, layout
from qtoolkit.checkpoints._plan import (
    Plan,
    TensorPlan,
    dequantize,
    make_plan,
    safetensors_dtype,
)
from qtoolkit.checkpoints._report import Report, TensorReport
from qtoolkit.checkpoints._roles import DEFAULT_SKIP
from qtoolkit.checkpoints._safetensors import SafetensorsFile, load, save, write_safetensors
from qtoolkit.checkpoints._source import open_source
from qtoolkit.checkpoints.layouts import LAYOUTS, Layout

if TYPE_CHECKING:
    from qtoolkit.checkpoints._convert import convert, dequantize_checkpoint

__all__ = [
    "DEFAULT_SKIP",
    "LAYOUTS",
    "CheckpointError",
    "Layout",
    "Plan",
    "Report",
    "SafetensorsFile",
    "TensorInfo",
    "TensorPlan",
    "TensorReport",
    "convert",
    "dequantize",
    "dequantize_checkpoint",
    "layout",
    "load",
    "make_plan",
    "open_source",
    "safetensors_dtype",
    "save",
    "write_safetensors",
]


def __getattr__(name: str) -> Any:
    if name in ("convert", "dequantize_checkpoint"):
        from qtoolkit.checkpoints import _convert

        globals()[name] = getattr(_convert, name)  # found without this function from now on
        return globals()[name]
    raise AttributeError(f"module 'qtoolkit.checkpoints' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
