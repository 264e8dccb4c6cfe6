"""Casts in C: an exact oracle and a fast yardstick, built where there is a compiler.

`reference_cast.c` follows the standards and is compared with `qt.encode`; `fast_cast.c` is what
casts are timed against. The parameters of the formats are typed in from their standards. The
compiler is $CC, or gcc; `compiler()` says whether there is one.
"""

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROUNDINGS = (
    "nearest_even",
    "nearest_away",
    "toward_zero",
    "toward_positive",
    "toward_negative",
    "to_odd",
)
SATURATIONS = ("finite", "propagate", "none")


class Fields(NamedTuple):
    """Fields of a format; `specials` and `overflow` are names of the enums in float_format.h."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: str
    overflow: str
    is_signed: bool = True
    has_zero: bool = True

    @property
    def code_dtype(self) -> np.dtype:
        bits = self.is_signed + self.exponent_bits + self.mantissa_bits
        return np.dtype(np.uint8 if bits <= 8 else np.uint16)


# IEEE 754-2019; bfloat16 is the upper half of float32.
# OCP OFP8 1.0; OCP MX 1.0; arXiv:2206.02915 (FNUZ); ue4m3 is E4M3 without its sign (NVFP4's scale).
FORMATS = {
    "float16": Fields(5, 10, 15, "IEEE", "TO_INF"),
    "bfloat16": Fields(8, 7, 127, "IEEE", "TO_INF"),
    "e5m2": Fields(5, 2, 15, "IEEE", "TO_INF"),
    "e4m3fn": Fields(4, 3, 7, "FN", "TO_NAN"),
    "e4m3fnuz": Fields(4, 3, 8, "FNUZ", "TO_NAN"),
    "e5m2fnuz": Fields(5, 2, 16, "FNUZ", "TO_NAN"),
    "e4m3b11fnuz": Fields(4, 3, 11, "FNUZ", "TO_NAN"),
    "e4m3_ieee": Fields(4, 3, 7, "IEEE", "TO_INF"),
    "e3m4": Fields(3, 4, 3, "IEEE", "TO_INF"),
    "ue4m3": Fields(4, 3, 7, "FN", "TO_NAN", is_signed=False),
    "e8m0fnu": Fields(8, 0, 127, "FN", "TO_NAN", is_signed=False, has_zero=False),
    "e2m3fn": Fields(2, 3, 1, "NONE", "TO_MAX"),
    "e3m2fn": Fields(3, 2, 3, "NONE", "TO_MAX"),
    "e2m1fn": Fields(2, 1, 1, "NONE", "TO_MAX"),
    "e1m2fn": Fields(1, 2, 1, "NONE", "TO_MAX"),
}
NUMPY_HAS = tuple(name for name in FORMATS if name not in ("ue4m3", "e1m2fn"))  # with ml_dtypes

_OPTIMIZED = ("-O3", "-march=native")
# Both passes give loops with conditions a shape that gcc 12 cannot vectorize: 12 times slower.
_VECTORIZABLE = ("-fno-tree-vrp", "-fno-thread-jumps")
_SOURCES = Path(__file__).parent
_built = tempfile.TemporaryDirectory(prefix="qtoolkit-c-")


def compiler() -> str | None:
    """Where the C compiler is, if there is one."""
    return shutil.which(os.environ.get("CC", "gcc"))


def compiler_version() -> str:
    """The first line of what the compiler says of itself."""
    command = [compiler() or "gcc", "--version"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0]


@functools.cache
def _build(source: str, options: tuple[str, ...]) -> ctypes.CDLL:
    path = compiler()
    if path is None:
        raise FileNotFoundError("c_casts: no C compiler: expected gcc on PATH, or another in $CC")
    library = tempfile.mkstemp(suffix=".so", dir=_built.name)[1]
    command = [path, *options, "-fPIC", "-shared", "-o", library, str(_SOURCES / source), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"c_casts: {' '.join(command)} failed:\n{done.stderr}")
    return ctypes.CDLL(library)


def _defines(fields: Fields, rounding: str) -> tuple[str, ...]:
    literal = ", ".join(str(int(f) if isinstance(f, bool) else f) for f in fields)
    code = f"-DCODE={fields.code_dtype}_t"
    return f"-DFORMAT={{{literal}}}", code, f"-DROUNDING={rounding.upper()}"


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)


class _Format(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in Fields._fields]


@functools.cache
def _structure(fields: Fields) -> _Format:
    specials = ("IEEE", "FN", "FNUZ", "EXTENDED", "NONE").index(fields.specials)
    overflow = ("TO_INF", "TO_NAN", "TO_MAX").index(fields.overflow)
    return _Format(*fields[:3], specials, overflow, fields.is_signed, fields.has_zero)


def reference_encode(
    x: np.ndarray, fields: Fields, rounding: str = "nearest_even", saturation: str = "finite"
) -> np.ndarray:
    """The codes of float32 numbers, from the oracle."""
    patterns = np.ascontiguousarray(x, np.float32).view(np.uint32)
    codes = np.empty(patterns.shape, np.uint32)
    variant = ROUNDINGS.index(rounding), SATURATIONS.index(saturation)
    arguments = _pointer(patterns), _pointer(codes), ctypes.c_size_t(codes.size)
    library = _build("reference_cast.c", _OPTIMIZED)
    library.encode_all(*arguments, ctypes.byref(_structure(fields)), *variant)
    return codes.astype(fields.code_dtype)


def reference_decode(codes: np.ndarray, fields: Fields) -> np.ndarray:
    """The values of codes, from the oracle: float64."""
    wide = np.ascontiguousarray(codes, np.uint32)
    values = np.empty(wide.shape, np.float64)
    arguments = _pointer(wide), _pointer(values), ctypes.c_size_t(wide.size)
    _build("reference_cast.c", _OPTIMIZED).decode_all(*arguments, ctypes.byref(_structure(fields)))
    return values


def difference_counter(
    fields: Fields, rounding: str, examples: int = 5
) -> Callable[[int, np.ndarray], tuple[list[int], list[list[int]]]]:
    """A function that compares codes with the oracle's, vectorized for this format and rounding.

    It takes the float32 pattern of the first code, and the codes of this and the following ones, a
    row for each of `SATURATIONS`. It returns, for each of them, how many differ and the patterns of
    the first that do.
    """
    options = (*_OPTIMIZED, *_VECTORIZABLE, *_defines(fields, rounding))
    library = _build("reference_cast.c", options)

    def count(first: int, codes: np.ndarray) -> tuple[list[int], list[list[int]]]:
        assert codes.dtype == fields.code_dtype
        rows, columns = codes.shape
        assert rows == len(SATURATIONS)
        different = np.empty(rows, np.uint32)
        found = np.empty((rows, examples), np.uint32)
        library.count_differences(
            ctypes.c_uint32(first),
            _pointer(codes),
            ctypes.c_uint32(columns),
            _pointer(different),
            _pointer(found),
            ctypes.c_uint32(examples),
        )
        numbers = different.tolist()
        return numbers, [row[:n].tolist() for row, n in zip(found, numbers, strict=True)]

    return count


def fast_cast(
    fields: Fields, rounding: str, source: str
) -> Callable[[np.ndarray, np.ndarray], None]:
    """The yardstick: a function that writes the codes of its first array to its second.

    Threads wait asleep between two calls, as JAX's do; awake they would take a core from what is
    timed next.
    """
    before = os.environ.get("GOMP_SPINCOUNT")
    os.environ["GOMP_SPINCOUNT"] = "0"  # read when the library is first loaded
    try:
        library = _build("fast_cast.c", (*_OPTIMIZED, "-fopenmp", *_defines(fields, rounding)))
    finally:
        del os.environ["GOMP_SPINCOUNT"]
        os.environ |= {} if before is None else {"GOMP_SPINCOUNT": before}
    function = library[f"cast_{source}"]

    def cast(x: np.ndarray, codes: np.ndarray) -> None:
        assert x.dtype.name == source
        assert codes.dtype == fields.code_dtype
        assert codes.size == x.size
        function(_pointer(x), _pointer(codes), ctypes.c_size_t(codes.size))

    return cast
