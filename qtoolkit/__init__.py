"""Exact, differentiable low-precision numbers for JAX.

A low-precision number format is data, and every conversion is one exact, jitted, differentiable
rounding of it. Names load on first use, so that `import qtoolkit` costs nothing and the command's
`--help` does not load JAX.
"""

from typing import TYPE_CHECKING, Any

from qtoolkit._version import __version__

if TYPE_CHECKING:
    from qtoolkit import (
        casts,
        checkpoints,
        formats,
        gradients,
        nnx,
        onnx,
        openvino,
        plots,
        products,
        pypto,
        scaling,
    )
    from qtoolkit.casts import (
        Stochastic,
        cast,
        cast_tree,
        decode,
        encode,
        pack,
        round_to_format,
        unpack,
    )
    from qtoolkit.formats import (
        BlockFormat,
        FloatFormat,
        IntFormat,
        Rules,
        TableFormat,
        format,
        p3109,
        promote,
        spec,
    )
    from qtoolkit.gradients import fake_cast, fake_convert, fake_quantize, round_cotangent
    from qtoolkit.products import Recipe, conv_general_dilated, dot_general, einsum
    from qtoolkit.scaling import QArray, metrics, quantize

_HOMES = {
    "casts": (
        "Stochastic",
        "cast",
        "cast_tree",
        "decode",
        "encode",
        "pack",
        "round_to_format",
        "unpack",
    ),
    "formats": (
        "BlockFormat",
        "FloatFormat",
        "IntFormat",
        "Rules",
        "TableFormat",
        "format",
        "p3109",
        "promote",
        "spec",
    ),
    "gradients": ("fake_cast", "fake_convert", "fake_quantize", "round_cotangent"),
    "products": ("Recipe", "conv_general_dilated", "dot_general", "einsum"),
    "scaling": ("QArray", "metrics", "quantize"),
    "onnx": (),
    "openvino": (),
    "pypto": (),
    "nnx": (),
    "checkpoints": (),
    "plots": (),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "BlockFormat",
    "FloatFormat",
    "IntFormat",
    "QArray",
    "Recipe",
    "Rules",
    "Stochastic",
    "TableFormat",
    "__version__",
    "cast",
    "cast_tree",
    "casts",
    "checkpoints",
    "conv_general_dilated",
    "decode",
    "dot_general",
    "einsum",
    "encode",
    "fake_cast",
    "fake_convert",
    "fake_quantize",
    "format",
    "formats",
    "gradients",
    "metrics",
    "nnx",
    "onnx",
    "openvino",
    "p3109",
    "pack",
    "plots",
    "products",
    "promote",
    "pypto",
    "quantize",
    "round_cotangent",
    "round_to_format",
    "scaling",
    "spec",
    "unpack",
]


def __getattr__(name: str) -> Any:
    import importlib

    if name in _HOMES:
        return importlib.import_module(f"qtoolkit.{name}")
    if name in _HOME_OF:
        value = getattr(importlib.import_module(f"qtoolkit.{_HOME_OF[name]}"), name)
        globals()[name] = value  # found without this function from now on
        return value
    raise AttributeError(f"module 'qtoolkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
