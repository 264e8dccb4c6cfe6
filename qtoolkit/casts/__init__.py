"""How a value becomes a code and back: the one layer that knows bits."""

from qtoolkit.casts._affine import product, quotient
from qtoolkit.casts._bits import check_holds, from_stored_codes
from qtoolkit.casts._casts import (
    cast,
    cast_for,
    check_arguments,
    decode,
    encode,
    encode_for,
    random_of,
    round_to_format,
)
from qtoolkit.casts._modes import DETERMINISTIC, SATURATIONS, Rounding, Stochastic
from qtoolkit.casts._pack import WIDTHS, pack, unpack
from qtoolkit.casts._powers import (
    binary_parts,
    exact_float32,
    from_stored,
    is_zero,
    power_of_two,
    stored,
    times_power_of_two,
)
from qtoolkit.casts._random import Draw
from qtoolkit.casts._sources import (
    FLOATS,
    check_differentiable,
    check_source,
    check_target,
    check_value_source,
    codes_of,
    is_array,
    round_values,
    shown_number,
    values_of,
)
from qtoolkit.casts._tree import cast_tree

__all__ = [
    "DETERMINISTIC",
    "FLOATS",
    "SATURATIONS",
    "WIDTHS",
    "Draw",
    "Rounding",
    "Stochastic",
    "binary_parts",
    "cast",
    "cast_for",
    "cast_tree",
    "check_arguments",
    "check_differentiable",
    "check_holds",
    "check_source",
    "check_target",
    "check_value_source",
    "codes_of",
    "decode",
    "encode",
    "encode_for",
    "exact_float32",
    "from_stored",
    "from_stored_codes",
    "is_array",
    "is_zero",
    "pack",
    "power_of_two",
    "product",
    "quotient",
    "random_of",
    "round_to_format",
    "round_values",
    "shown_number",
    "stored",
    "times_power_of_two",
    "unpack",
    "values_of",
]
