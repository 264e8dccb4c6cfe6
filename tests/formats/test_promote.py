"""promote: the smallest format that holds all values. Oracle: sets of values, enumerated.

Formats of up to 16 bits are lists of float64 numbers (`values()`, tested against published tables
beside this file), and what float32 holds is what NumPy's float32 gives back. Wide formats are
compared with `numpy.promote_types`.
"""

import functools
import itertools
import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import qtoolkit.formats as formats
from qtoolkit.formats import (
    FORMATS,
    FloatFormat,
    IntFormat,
    Overflow,
    Specials,
    TableFormat,
    promote,
)

# The table of the docstring, typed in.
INTEGERS = (
    *("bool", "uint2", "int2", "uint4", "int4", "uint8", "int8"),
    *("uint16", "int16", "uint32", "int32", "uint64", "int64"),
)
FLOATS = (
    *(
        "e2m1fn",
        "e4m3fn",
        "e5m2",
        "e4m3_ieee",
        "e3m4",
        "e4m3fnuz",
        "e5m2fnuz",
        "e4m3b11fnuz",
        "e8m0fnu",
    ),
    *("bfloat16", "float16", "float32", "float64"),
)
CANDIDATES = [formats.format(name) for name in (*INTEGERS, *FLOATS)]
SMALL = [fmt for fmt in FORMATS if fmt.bits <= 16]


@functools.cache
def values(fmt):
    """Distinct values, with "nan" for NaN; -0 is 0."""
    found = fmt.values() + 0.0  # -0 + 0 is 0
    return frozenset("nan" if math.isnan(v) else v for v in found.tolist())


@functools.cache
def array(fmt):
    finite = [v for v in values(fmt) if v != "nan" and math.isfinite(v)]
    return np.array(finite)


@functools.cache
def holds(wide, fmt):
    if wide.bits <= 16:
        return values(fmt) <= values(wide)
    if isinstance(wide, IntFormat):
        info, x = np.iinfo(wide.dtype), array(fmt)
        inside = (x >= float(info.min)) & (x <= float(info.max)) & (x == np.rint(x))
        return len(values(fmt)) == x.size and bool(inside.all())
    with np.errstate(over="ignore", under="ignore"):
        return np.array_equal(array(fmt).astype(wide.dtype).astype(np.float64), array(fmt))


def expected(*operands):
    """By enumeration, for formats of up to 16 bits."""
    if all(fmt == operands[0] for fmt in operands):
        return operands[0]
    integers = all(isinstance(fmt, IntFormat) for fmt in operands)
    found = [
        (fmt.bits, fmt not in operands, place, fmt)
        for place, fmt in enumerate(CANDIDATES)
        if isinstance(fmt, IntFormat) == integers and all(holds(fmt, other) for other in operands)
    ]
    return min(found)[-1] if found else None


def got(*operands):
    try:
        return promote(*operands)
    except ValueError:
        return None


def test_the_candidates_are_the_formats_with_a_jax_dtype():
    assert set(CANDIDATES) == {fmt for fmt in FORMATS if fmt.dtype is not None}
    for fmt in CANDIDATES:
        with jax.enable_x64(True):
            assert jnp.zeros((1,), fmt.dtype).dtype == fmt.dtype


def test_every_pair_of_formats_up_to_16_bits():
    pairs = list(itertools.combinations_with_replacement(SMALL, 2))
    assert len(pairs) == 27 * 28 // 2
    wrong = [(a.name, b.name) for a, b in pairs if promote(a, b) != expected(a, b)]
    assert wrong == []


def random_formats(count, seed):
    """Formats that no table has: odd biases, no zero, no sign, few codes."""
    rng, found = random.Random(seed), []
    while len(found) < count:
        kind = rng.randrange(6)
        if kind == 0:
            bits, signed = rng.randint(1, 12), rng.random() < 0.5
            found.append(IntFormat(name=f"i{len(found)}", bits=bits, signed=signed))
        elif kind == 1:
            numbers = sorted({rng.randint(-40, 40) * 2.0 ** rng.randint(-8, 8) for _ in range(30)})
            chosen = tuple(rng.sample(numbers, 8))
            if max(chosen) > 0:
                found.append(TableFormat(name=f"t{len(found)}", values_by_code=chosen))
        else:
            specials = rng.choice(list(Specials))
            signed = rng.random() < 0.6
            try:
                fmt = FloatFormat(
                    name=f"f{len(found)}",
                    exponent_bits=rng.randint(1, 5),
                    mantissa_bits=rng.randint(0, 6),
                    bias=rng.randint(-12, 40),
                    specials=specials,
                    overflow=Overflow.MAX,
                    signed=signed,
                    has_zero=signed or rng.random() < 0.5,
                )
            except ValueError:
                continue
            found.append(fmt)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_random_formats_by_enumeration(seed):
    mine = random_formats(24, seed)
    others = [*mine, *SMALL]
    results = set()
    for a in mine:
        for b in others:
            wanted = expected(a, b)
            assert got(a, b) == wanted, (a, b)
            results.add(wanted)
    # The draw reaches most of the table, the operands themselves and the last resorts.
    assert {formats.E4M3FN, formats.BFLOAT16, formats.FLOAT16, formats.FLOAT32} <= results


def test_p3109_formats_by_enumeration():
    mine = [
        formats.p3109(bits, precision, signed=signed, extended=extended)
        for bits in (3, 4, 7)
        for signed in (True, False)
        for precision in range(1, bits + (not signed))
        for extended in (True, False)
    ]
    for a in mine:
        for b in (*mine[::9], formats.E5M2, formats.E4M3FNUZ, formats.INT4, formats.FLOAT16):
            assert got(a, b) == expected(a, b), (a.name, b.name)


NUMPY_DTYPES = ["bool", *(f"{u}int{n}" for u in ("", "u") for n in (8, 16, 32, 64))]
NUMPY_DTYPES += ["float16", "float32", "float64"]


def test_numpy_agrees_but_where_it_rounds():
    """NumPy sends 64-bit integers with floats, and uint64 with signed ones, to float64."""
    for a, b in itertools.product(NUMPY_DTYPES, repeat=2):
        floats = [name for name in (a, b) if name.startswith("float")]
        rounds = "uint64" in (a, b) and any(name.startswith("int") for name in (a, b))
        rounds |= bool(floats) and bool({a, b} & {"int64", "uint64"})
        if rounds:
            assert np.promote_types(a, b) == np.float64
            with pytest.raises(
                ValueError, match=f"holds every value of {min(a, b)} and {max(a, b)}"
            ):
                promote(a, b)
        else:
            assert promote(a, b).dtype == np.promote_types(a, b), (a, b)


@pytest.mark.parametrize(
    ("pair", "ours", "jax_has"),
    [
        (("float16", "bfloat16"), "float32", "float32"),
        (("int8", "bfloat16"), "bfloat16", "bfloat16"),
        (("int4", "uint4"), "int8", None),  # JAX refuses integers of 4 bits and less
        (("int16", "bfloat16"), "float32", "bfloat16"),  # JAX rounds the integer
        (("int32", "float32"), "float64", "float32"),  # JAX rounds the integer
        (("e4m3fn", "float32"), "float32", None),  # JAX refuses FP8 with anything
        (("e4m3fn", "e5m2"), "bfloat16", None),
        (("e4m3fn", "int8"), "bfloat16", "float8_e4m3fn"),  # JAX rounds the integer
        (("e4m3fn", "e8m0fnu"), "bfloat16", None),
    ],
)
@pytest.mark.quick
def test_where_jax_rounds_or_refuses(pair, ours, jax_has):
    a, b = (formats.format(name).dtype for name in pair)
    assert promote(a, b).name == ours
    with jax.numpy_dtype_promotion("standard"), jax.enable_x64(True):
        if jax_has is None:
            with pytest.raises(Exception, match="no available implicit dtype promotion path"):
                jnp.promote_types(a, b)
        else:
            assert jnp.promote_types(a, b) == np.dtype(jax_has)


@pytest.mark.parametrize(
    ("a", "b", "result"),
    [
        ("e2m1fn", "e1m2fn", "e4m3fn"),
        ("e2m1fn", "int2", "e2m1fn"),  # an operand
        ("e2m1fn", "int4", "e4m3fn"),  # the first of five
        ("e4m3fnuz", "int4", "e4m3fnuz"),
        (
            "e4m3_ieee",
            "e4m3fn",
            "bfloat16",
        ),  # e4m3fn holds every number of e4m3_ieee, but no infinity
        ("e5m2", "hifloat8", "bfloat16"),
        ("float16", "hifloat8", "float16"),
        ("float16", "e8m0fnu", "float32"),
        ("nf4", "bool", "float32"),  # its values are float32's
        ("binary3p1sf", "bool", "e4m3fn"),  # e2m1fn holds every number, but no NaN
        ("tf32", "bfloat16", "float32"),  # no JAX dtype
        ("uint3", "bool", "uint4"),
        ("uint1", "bool", "bool"),
        ("int24", "float32", "float32"),
        ("int26", "float32", "float64"),
        ("int25", "float32", "float32"),
        ("int54", "float64", "float64"),
        ("uint53", "float32", "float64"),
        ("float32", "float64", "float64"),
        ("e8m0fnu", "float64", "float64"),
        ("uint32", "int2", "int64"),
        ("uint64", "uint8", "uint64"),
    ],
)
def test_examples(a, b, result):
    assert promote(a, b) == promote(b, a) == formats.format(result)


def test_symmetric_idempotent_and_never_smaller():
    for a, b in itertools.product(FORMATS, repeat=2):
        result = got(a, b)
        assert result == got(b, a)
        if result is not None:
            assert a == b or (result in CANDIDATES and result.bits >= min(a.bits, b.bits))
            # What is promoted again stays, but a format without a JAX dtype leaves itself.
            if result in CANDIDATES:
                assert got(a, result) == got(b, result) == result
    for fmt in FORMATS:
        assert promote(fmt, fmt) is fmt
        assert promote(fmt, fmt, fmt) is fmt


def test_integers_associate_and_floats_need_all_at_once():
    def fold(a, b, c):
        first = got(a, b)
        return None if first is None else got(first, c)

    differ = 0
    for triple in itertools.combinations_with_replacement(CANDIDATES, 3):
        at_once = got(*triple)
        for a, b, c in (triple, triple[1:] + triple[:1], triple[2:] + triple[:2]):
            assert got(c, b, a) == at_once
            pairwise = fold(a, b, c)
            if all(isinstance(fmt, IntFormat) for fmt in triple):
                assert pairwise == at_once
            elif pairwise != at_once:  # and then at a loss
                differ += 1
                assert pairwise is None or pairwise.bits >= at_once.bits
    assert differ > 100
    three = (formats.E4M3FN, formats.E5M2, formats.FLOAT16)
    assert fold(*three) == formats.FLOAT32
    assert fold(*reversed(three)) == formats.FLOAT16
    assert promote(*three) == formats.FLOAT16


@pytest.mark.parametrize("specials", Specials)
def test_formats_of_one_exponent_bit(specials):
    """All or nearly all of their values are subnormal."""
    for mantissa, bias in itertools.product((1, 2, 4), (-3, 1, 20)):
        fmt = FloatFormat(
            name="mine",
            exponent_bits=1,
            mantissa_bits=mantissa,
            bias=bias,
            specials=specials,
            overflow=Overflow.MAX,
        )
        for other in SMALL[::3]:
            assert got(fmt, other) == expected(fmt, other), (mantissa, bias, other.name)


@pytest.mark.quick
def test_spellings_and_dtypes():
    assert promote("F8_E4M3", jnp.float32) is formats.FLOAT32
    assert promote(np.dtype("int8"), "DT_FP16") is formats.FLOAT16
    assert promote("e4m3fn", "e5m2", "FLOAT4E2M1").dtype == jnp.bfloat16


def test_what_no_format_holds():
    huge = formats.p3109(16, 2)  # exponents beyond those of float64
    assert promote(huge, huge) is huge
    with pytest.raises(ValueError, match="no float format with a JAX dtype holds every value of b"):
        promote(huge, "bool")
    with pytest.raises(ValueError, match=r"no integer format .* int64 and uint64;"):
        promote("uint64", "int64")
    with pytest.raises(ValueError, match="of e4m3fn, float16 and int64; choose which of them"):
        promote("int64", "e4m3fn", "float16")


@pytest.mark.quick
def test_what_is_no_format():
    with pytest.raises(ValueError, match="unknown format 'e4m4fn'; did you mean"):
        promote("e4m4fn", "e5m2")
    with pytest.raises(TypeError, match="expected a format, its name as a string, or a dtype"):
        promote("e5m2", 3)
    with pytest.raises(TypeError, match=r"'mxfp4' is a block format; .* element format 'e2m1fn'"):
        promote(formats.MXFP4, "e5m2")
