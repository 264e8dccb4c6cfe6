"""Quantized products on plain arrays, and the recipes that say how."""

from qtoolkit._names import hint_at_names
from qtoolkit.products import _policies as policies
from qtoolkit.products import _presets as recipes
from qtoolkit.products._cache import KVCache
from qtoolkit.products._calibration import Calibration
from qtoolkit.products._compiled import NativeCalls, native_calls
from qtoolkit.products._functions import conv_general_dilated, dot_general, einsum, ragged_dot
from qtoolkit.products._gain import Gain, Gpu, expected_gain
from qtoolkit.products._numerics import Numerics
from qtoolkit.products._operand import Current, Delayed, Hadamard, Learned, Operand, Static
from qtoolkit.products._recipe import Recipe
from qtoolkit.products._report import Product, Report
from qtoolkit.products._residuals import CODES
from qtoolkit.products._sensitivity import Sensitivity
from qtoolkit.products._wire import all_to_all

__all__ = [
    "CODES",
    "Calibration",
    "Current",
    "Delayed",
    "Gain",
    "Gpu",
    "Hadamard",
    "KVCache",
    "Learned",
    "NativeCalls",
    "Numerics",
    "Operand",
    "Product",
    "Recipe",
    "Report",
    "Sensitivity",
    "Static",
    "all_to_all",
    "conv_general_dilated",
    "dot_general",
    "einsum",
    "expected_gain",
    "native_calls",
    "policies",
    "ragged_dot",
    "recipes",
]

hint_at_names(__name__)
