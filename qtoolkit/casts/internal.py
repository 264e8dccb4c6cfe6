"""What the packages above need of casts and users do not; most of it checks no arguments."""

from qtoolkit.casts._affine import (
    ieee_quotient,
    is_zero,
    kept_from_zero,
    product,
    quotient,
    settled,
)
from qtoolkit.casts._bits import check_holds, dtype_from_codes, exact_float32, holds
from qtoolkit.casts._casts import cast_for, check_arguments, encode_for, without_derivative
from qtoolkit.casts._elementwise import by_platform, elementwise, on_cpu, varying_alike
from qtoolkit.casts._modes import Rounding, check_rounding
from qtoolkit.casts._order import (
    from_magnitude_ordinal,
    from_ordinal,
    infinity_ordinal,
    inside,
    magnitude_ordinal,
    ordinal,
    ordinal_of,
    widened,
)
from qtoolkit.casts._pack import WIDTHS
from qtoolkit.casts._parameters import (
    FINITE,
    NONZERO,
    POSITIVE,
    Domain,
    check_domain,
    check_dtype,
    number,
    parameter,
)
from qtoolkit.casts._powers import (
    binary_parts,
    floor_log2,
    nearest_power_of_two,
    power_of_two,
    times_power_of_two,
)
from qtoolkit.casts._projection import NEAREST, UNCLAMPED, projection_of
from qtoolkit.casts._random import key_words
from qtoolkit.casts._sources import (
    FLOATS,
    check_differentiable,
    check_source,
    check_target,
    check_value_source,
    codes_of,
    is_array,
    round_values,
    values_of,
)
from qtoolkit.casts._storage import (
    from_stored,
    in_dtype,
    power_from_stored,
    power_to_stored,
    rounded_to,
    to_stored,
)
from qtoolkit.casts._tree import leaf_path

__all__ = [
    "FINITE",
    "FLOATS",
    "NEAREST",
    "NONZERO",
    "POSITIVE",
    "UNCLAMPED",
    "WIDTHS",
    "Domain",
    "Rounding",
    "binary_parts",
    "by_platform",
    "cast_for",
    "check_arguments",
    "check_differentiable",
    "check_domain",
    "check_dtype",
    "check_holds",
    "check_rounding",
    "check_source",
    "check_target",
    "check_value_source",
    "codes_of",
    "dtype_from_codes",
    "elementwise",
    "encode_for",
    "exact_float32",
    "floor_log2",
    "from_magnitude_ordinal",
    "from_ordinal",
    "from_stored",
    "holds",
    "ieee_quotient",
    "in_dtype",
    "infinity_ordinal",
    "inside",
    "is_array",
    "is_zero",
    "kept_from_zero",
    "key_words",
    "leaf_path",
    "magnitude_ordinal",
    "nearest_power_of_two",
    "number",
    "on_cpu",
    "ordinal",
    "ordinal_of",
    "parameter",
    "power_from_stored",
    "power_of_two",
    "power_to_stored",
    "product",
    "projection_of",
    "quotient",
    "round_values",
    "rounded_to",
    "settled",
    "times_power_of_two",
    "to_stored",
    "values_of",
    "varying_alike",
    "widened",
    "without_derivative",
]
