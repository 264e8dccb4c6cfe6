"""Layouts, that is ways of storing quantized weights: a file each, a registry. No JAX here."""

from qtoolkit.checkpoints.layouts import (
    _awq,
    _compressed_tensors,
    _finegrained,
    _gpt_oss,
    _gptq,
    _modelopt,
    _plain,
)
from qtoolkit.checkpoints.layouts._encoding import Encoding, Packing
from qtoolkit.checkpoints.layouts._layout import SCALINGS, Layout, Scheme

LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        _plain.LAYOUT,
        _compressed_tensors.LAYOUT,
        _finegrained.LAYOUT,
        _modelopt.LAYOUT,
        _gpt_oss.LAYOUT,
        _gptq.LAYOUT,
        _awq.LAYOUT,
    )
}
WRITTEN = [name for name, layout in LAYOUTS.items() if layout.schemes]  # others are only read

__all__ = ["LAYOUTS", "SCALINGS", "WRITTEN", "Encoding", "Layout", "Packing", "Scheme"]
