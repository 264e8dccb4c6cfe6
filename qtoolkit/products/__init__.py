"""Quantized products on plain arrays, and the recipes that say how."""

from qtoolkit.products._functions import conv_general_dilated, dot_general, einsum, ragged_dot
from qtoolkit.products._operand import CODES
from qtoolkit.products._recipe import Current, Delayed, Hadamard, Operand, Recipe, Static

__all__ = [
    "CODES",
    "Current",
    "Delayed",
    "Hadamard",
    "Operand",
    "Recipe",
    "Static",
    "conv_general_dilated",
    "dot_general",
    "einsum",
    "ragged_dot",
]
