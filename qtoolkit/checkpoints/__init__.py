"""Safetensors files read, written and quantized as a stream.

JAX loads with `convert` and with quantized arrays only.
"""

from typing import TYPE_CHECKING, Any

from qtoolkit.checkpoints._header import CheckpointError, TensorInfo, layout
from qtoolkit.checkpoints._plan import (
    DEFAULT_SKIP,
    Plan,
    TensorPlan,
    dequantize,
    make_plan,
    safetensors_dtype,
)
from qtoolkit.checkpoints._pytrees import load, save
from qtoolkit.checkpoints._report import Report, TensorReport
from qtoolkit.checkpoints._safetensors import SafetensorsFile, write_safetensors

if TYPE_CHECKING:
    from qtoolkit.checkpoints._convert import convert

__all__ = [
    "DEFAULT_SKIP",
    "CheckpointError",
    "Plan",
    "Report",
    "SafetensorsFile",
    "TensorInfo",
    "TensorPlan",
    "TensorReport",
    "convert",
    "dequantize",
    "layout",
    "load",
    "make_plan",
    "safetensors_dtype",
    "save",
    "write_safetensors",
]


def __getattr__(name: str) -> Any:
    if name == "convert":
        from qtoolkit.checkpoints._convert import convert

        globals()[name] = convert  # found without this function from now on
        return convert
    raise AttributeError(f"module 'qtoolkit.checkpoints' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
