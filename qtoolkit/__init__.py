"""Low-precision number formats for JAX: exact casts, and gradients for training.

A low-precision number format is data, and every conversion is one exact, jitted, differentiable
rounding of it. Names load on first use, so that `import qtoolkit` costs nothing and the command's
`--help` does not load JAX. Type checkers read `__init__.pyi`; a test compares it with the table.
"""

import importlib

from qtoolkit._names import unknown
from qtoolkit._version import __version__

# The public packages, each with its names that are also at the top level.
_NAMES_BY_PACKAGE = {
    "formats": (
        *("BlockFormat", "FloatFormat", "IntFormat", "Rules", "TableFormat"),
        *("format", "p3109", "posit", "spec"),
    ),
    "casts": ("Stochastic", "cast", "decode", "encode", "pack", "round_to_format", "unpack"),
    "scaling": ("QArray", "metrics", "quantize"),
    "gradients": ("fake_cast", "fake_convert", "fake_quantize", "round_cotangent"),
    "products": (
        *("Operand", "Recipe", "conv_general_dilated", "dot_general", "einsum"),
        *("policies", "ragged_dot", "recipes"),
    ),
    "post_training": (),
    "onnx": (),
    "openvino": (),
    "pypto": (),
    "nnx": (),
    "linen": (),
    "optim": (),
    "checkpoints": (),
    "plots": (),
}
_HOME_OF = {name: package for package, names in _NAMES_BY_PACKAGE.items() for name in names}

# `from qtoolkit import *` works without matplotlib, an extra that `plots` loads.
__all__ = ["__version__", *(name for name in _NAMES_BY_PACKAGE if name != "plots"), *_HOME_OF]
_ALL = [*__all__, "plots"]


def __getattr__(name: str) -> object:  # `typing` takes longer to load than all of this
    if name in _NAMES_BY_PACKAGE:
        return importlib.import_module(f"qtoolkit.{name}")
    if name in _HOME_OF:
        value = getattr(importlib.import_module(f"qtoolkit.{_HOME_OF[name]}"), name)
        globals()[name] = value  # found without this function from now on
        return value
    raise unknown("qtoolkit", name)


def __dir__() -> list[str]:
    return sorted(_ALL)
