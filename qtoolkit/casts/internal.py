"""What the packages above need of casts and users do not; most of it checks no arguments."""

# ruff: noqa: F401  (imported for those packages)

from qtoolkit.casts._affine import (
    ieee_quotient,
    is_zero,
    prevent_contraction,
    prevent_merging,
    product,
    quotient,
    without_underflow,
)
from qtoolkit.casts._bits import (
    check_holds,
    codes_from_dtype,
    dtype_from_codes,
    exact_float32,
    holds,
)
from qtoolkit.casts._casts import (
    cast_for,
    check_arguments,
    encode_for,
    rounded,
    types_of,
    without_derivative,
)
from qtoolkit.casts._checks import (
    FINITE,
    FLOATS,
    NONZERO,
    POSITIVE,
    Domain,
    broadcast_like,
    broadcasts_to,
    check_differentiable,
    check_domain,
    check_dtype,
    check_source,
    check_target,
    check_unnarrowed,
    check_value_source,
    conversion_line,
    hint_for_others,
    is_array,
    number,
    parameter,
    result_dtype,
    with_rank,
)
from qtoolkit.casts._codes import codes_of, round_values, values_of
from qtoolkit.casts._compact import (
    codes_through_float16,
    has_unlimited_values,
    is_part_of_float16,
    unlimited_values,
)
from qtoolkit.casts._differentiable import (
    differentiable_in_dtype,
    differentiable_product,
    differentiable_quotient,
    differentiable_widened,
    linear_product,
    straight_through,
)
from qtoolkit.casts._elementwise import (
    barrier_on_cpu,
    elementwise,
    is_sharded,
    on_cpu,
    traced_for_cpu,
    varying_alike,
)
from qtoolkit.casts._hardware import has_native_codes, native_codes, row_major
from qtoolkit.casts._keywords import hinting
from qtoolkit.casts._linear import linear_in_dtype, linear_with_transpose
from qtoolkit.casts._modes import MODES, Rounding, check_rounding
from qtoolkit.casts._order import (
    bucket,
    bucket_edge,
    from_magnitude_ordinal,
    infinity_ordinal,
    is_within,
    magnitude_ordinal,
    ordinal,
    widened,
)
from qtoolkit.casts._pack import WIDTHS
from qtoolkit.casts._powers import (
    binary_parts,
    e8m0_codes,
    floor_log2,
    nearest_power_of_two,
    over_e8m0,
    power_of_two,
    times_e8m0,
    times_from_subnormal,
    times_power_of_two,
    times_to_subnormal,
)
from qtoolkit.casts._projection import NEAREST, UNCLAMPED, projection_of
from qtoolkit.casts._random import Draw, hash_words, hashed_index, key_words, mixed_key
from qtoolkit.casts._serialization import serializable
from qtoolkit.casts._storage import (
    from_stored,
    in_dtype,
    positive_to_stored,
    power_from_stored,
    power_to_stored,
    rounded_to,
    to_stored,
)
