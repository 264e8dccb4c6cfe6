"""What the packages above need of products and users do not."""

from qtoolkit.products._calibration import (
    Summary,
    calibration_of,
    check_calibrated,
    summary_of,
)
from qtoolkit.products._inspection import computes_product
from qtoolkit.products._numerics import HEADER as NUMERICS_HEADER
from qtoolkit.products._numerics import numerics_of
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
from qtoolkit.products._sensitivity import sensitivity_of
from qtoolkit.products._site import Site, enclosing, scope
from qtoolkit.products._starting import first_scales
from qtoolkit.products._taps import Place, instrument

__all__ = [
    "MARKER",
    "NUMERICS_HEADER",
    "PRODUCTS",
    "Found",
    "Place",
    "Site",
    "State",
    "Summary",
    "calibration_of",
    "check_calibrated",
    "check_recipe",
    "computes_product",
    "enclosing",
    "first_scales",
    "inner_jaxprs",
    "instrument",
    "is_quantized",
    "numerics_of",
    "quantized_product",
    "report_of",
    "rewritten",
    "scope",
    "sensitivity_of",
    "summary_of",
]
