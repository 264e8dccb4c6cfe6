"""Layouts, that is ways of storing quantized weights: a file each, a registry. No JAX here."""

from qtoolkit.checkpoints.layouts import (
    _auto_round,
    _awq,
    _bitsandbytes,
    _comfyui,
    _compressed_tensors,
    _finegrained,
    _gpt_oss,
    _gptq,
    _hqq,
    _mlx,
    _modelopt,
    _plain,
    _torchao,
)
from qtoolkit.checkpoints.layouts._encoding import Encoding, Packing
from qtoolkit.checkpoints.layouts._headers import Headers
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
        _auto_round.LAYOUT,
        _mlx.LAYOUT,
        _bitsandbytes.LAYOUT,
        _hqq.LAYOUT,
        _torchao.LAYOUT,
        _comfyui.LAYOUT,
    )
}
WRITTEN = [name for name, layout in LAYOUTS.items() if layout.schemes]  # others are only read

__all__ = ["LAYOUTS", "SCALINGS", "WRITTEN", "Encoding", "Headers", "Layout", "Packing", "Scheme"]
