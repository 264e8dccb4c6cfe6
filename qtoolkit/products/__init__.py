"""Quantized products on plain arrays, and the recipes that say how."""

from qtoolkit.products._functions import conv_general_dilated, dot_general, einsum
from qtoolkit.products._recipe import Recipe

__all__ = ["Recipe", "conv_general_dilated", "dot_general", "einsum"]
