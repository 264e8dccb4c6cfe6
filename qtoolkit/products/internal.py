"""What the packages above need of products and users do not."""

from qtoolkit.products._inspection import computes_product, product_attributes
from qtoolkit.products._product import State, quantized_product
from qtoolkit.products._recipe import check_recipe
from qtoolkit.products._report import report_of
from qtoolkit.products._rewrite import (
    MARKER,
    PRODUCTS,
    Found,
    inner_jaxprs,
    is_quantized,
    rewritten,
)
from qtoolkit.products._site import Site, enclosing, scope

__all__ = [
    "MARKER",
    "PRODUCTS",
    "Found",
    "Site",
    "State",
    "check_recipe",
    "computes_product",
    "enclosing",
    "inner_jaxprs",
    "is_quantized",
    "product_attributes",
    "quantized_product",
    "report_of",
    "rewritten",
    "scope",
]
