"""What the format explorer knows: every format of at most 16 bits, and the published block formats.

The page computes values and roundings from these fields, so that the data stay small; a browser
test compares what it shows with the library.
"""

import json
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from qtoolkit import formats
from qtoolkit.formats import BlockFormat, FloatFormat, Format, TableFormat

MOST_BITS = 16


def javascript() -> str:
    """A script that sets `qtoolkitFormats`: a script, unlike JSON, loads from a folder, too."""
    return f"const qtoolkitFormats = {json.dumps(data(), separators=(',', ':'))};\n"


def data() -> dict[str, Any]:
    return {
        "groups": [
            {"label": label, "formats": [_entry(fmt) for fmt in group]}
            for label, group in _groups()
        ],
        "blocks": [_block(fmt) for fmt in formats.BLOCK_FORMATS],
    }


def _groups() -> Iterator[tuple[str, list[Format]]]:
    shipped = [fmt for fmt in formats.FORMATS if fmt.bits <= MOST_BITS]
    yield "floats", [fmt for fmt in shipped if isinstance(fmt, FloatFormat)]
    yield "tables", [fmt for fmt in shipped if isinstance(fmt, TableFormat)]
    yield "integers", [f for f in shipped if not isinstance(f, FloatFormat | TableFormat)]
    for signed in (True, False):
        yield f"IEEE P3109, {'signed' if signed else 'unsigned'}", list(_p3109(signed))


def _p3109(signed: bool) -> Iterator[Format]:
    for bits in range(3, 9):
        for precision in range(1, bits + (not signed)):
            for extended in (True, False):
                yield formats.p3109(bits, precision, signed=signed, extended=extended)


def _entry(fmt: Format) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": fmt.name,
        "bits": fmt.bits,
        "signed": fmt.signed,
        "maxCode": fmt.max_code,
        "infCode": fmt.inf_code,
        "nanCode": fmt.nan_code,
    }
    if isinstance(fmt, FloatFormat):
        return entry | {
            "kind": "float",
            "exponentBits": fmt.exponent_bits,
            "mantissaBits": fmt.mantissa_bits,
            "bias": fmt.bias,
            "hasZero": fmt.has_zero,
            "hasNegativeZero": fmt.has_negative_zero,
            "overflow": fmt.overflow.name,
            "overflowCode": fmt.overflow_code,
            "nanRanges": [[codes.start, codes.stop] for codes in fmt.nan_ranges],
        }
    if isinstance(fmt, TableFormat):
        return entry | {
            "kind": "table",
            "values": [_number(value) for value in fmt.values_by_code],
            "ties": fmt.ties,
            "beyond": fmt.beyond,
            "overflow": fmt.overflow.name,
        }
    return entry | {"kind": "integer", "isBool": fmt.is_bool}


def _number(value: float) -> float | str:
    """JSON has neither NaN nor infinities."""
    return value if math.isfinite(value) else str(value)


def _block(fmt: BlockFormat) -> dict[str, Any]:
    assert fmt.scale is not None
    exponent, significand = _binary(fmt.largest)
    return {
        "name": fmt.name,
        "element": _entry(fmt.element),
        "block": fmt.block,
        "scaleName": fmt.scale.name,
        # Scales of 16 bits and less are rounded by their own format; the others are float32.
        "scale": _entry(fmt.scale) if fmt.scale.bits <= MOST_BITS else None,
        "rule": fmt.rule,
        "hasTensorScale": fmt.tensor_scale is not None,
        "largest": float(fmt.largest),
        "largestExponent": exponent,
        "largestFraction": int((significand - 1) * 2**23),
        "scaleMax": float(fmt.scale.max_finite),
        "leastScale": float(max(fmt.scale.min_positive, Fraction(1, 2**126))),
        "powers": [_binary(fmt.scale.min_positive)[0], _binary(fmt.scale.max_finite)[0]],
        "elementExponent": fmt.element_exponent,
        "narrowRange": fmt.narrow_range,
        "amaxEpsilon": fmt.amax_epsilon,
    }


def _binary(value: Fraction) -> tuple[int, Fraction]:
    """Exponent and significand, 1 <= significand < 2."""
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    exponent -= value < Fraction(2) ** exponent
    return exponent, value / Fraction(2) ** exponent
