"""`format`, and its error for unknown names: one line, with at most three names to use instead."""

import difflib
import reprlib
from typing import Any

from qtoolkit.formats._element import BY_SPELLING, ElementFormat
from qtoolkit.formats._names import Format, FormatLike, find, name_of
from qtoolkit.formats._p3109 import NAMES as P3109_NAMES

# The published block formats by name. `_published` adds them: block formats stand above this file,
# because `format` resolves their elements.
BLOCKS: dict[str, Any] = {}
# Names that mean two formats. With "E4M3" ONNX, OpenVINO and safetensors mean E4M3FN, whose largest
# value is 448; LLVM and ml_dtypes mean the format with infinities, whose largest value is 240.
_AMBIGUOUS = {
    "e4m3": ("e4m3fn", "e4m3_ieee"),
    **dict.fromkeys(("f8", "fp8", "float8"), ("e4m3fn", "e5m2")),
    **dict.fromkeys(("f6", "fp6", "float6"), ("e2m3fn", "e3m2fn")),
}
# Names that are spelled like those of other formats: "float4" like "float64".
_MEANT = {
    **dict.fromkeys(("fp4", "float4"), ("e2m1fn", "mxfp4", "nvfp4")),
    "bf8": ("e5m2", "e5m2fnuz"),
    "hf8": ("e4m3fn", "e4m3fnuz"),
}


def format(spec: FormatLike) -> Format:
    """The format that `spec` names.

    Args:
      spec: A format (returned as it is); a string in any of the spellings of qtoolkit ("e4m3fn"),
        numpy and JAX ("float8_e4m3fn"), PyTorch ("torch.float8_e4m3fn"), ONNX ("FLOAT8E4M3FN"),
        OpenVINO ("f8e4m3") or safetensors ("F8_E4M3"), IEEE P3109 ("Binary8p3se"), a posit
        ("posit16") or an integer of any width ("int5"), upper or lower case; or a numpy, ml_dtypes
        or JAX dtype. numpy's type codes are not read: "i8" is OpenVINO's int8, "f4" safetensors'
        FP4.

    Raises:
      ValueError: No format has that name, several may be meant ("e4m3", "fp8"), or it is a block
        format ("mxfp4"); the message names up to three to use instead.
      TypeError: `spec` is neither a format nor a string nor a dtype.

    Examples:
      >>> qt.format("F8_E4M3") is qt.format("float8_e4m3fn") is qt.format(jnp.float8_e4m3fn)
      True
      >>> fmt = qt.format("e4m3fn")
      >>> float(fmt.max_finite), fmt.min_positive, fmt.dtype
      (448.0, Fraction(1, 512), dtype(float8_e4m3fn))
    """
    fmt = find(spec)
    if fmt is None:
        raise not_found("format", spec)
    return fmt


def not_found(where: str, spec: Any) -> ValueError | TypeError:
    """The exception that `where` ("format" or "spec") raises if it cannot resolve `spec`."""
    block: Any = BLOCKS.get(spec.lower()) if isinstance(spec, str) else spec
    if isinstance(getattr(block, "element", None), ElementFormat):  # a block format, for "format"
        kind = ValueError if isinstance(spec, str) else TypeError
        return kind(
            f"{where}: {block.name!r} is a block format; use qtoolkit.quantize or fake_quantize "
            f"with it, or its element format {block.element.name!r} in a cast"
        )
    name = name_of(spec)
    if name is None:
        return TypeError(
            f"{where}: got {' '.join(reprlib.repr(spec).split())} of type {type(spec).__name__}, "
            "expected a format, its name as a string, or a dtype, e.g. 'e4m3fn' or "
            "jnp.float8_e4m3fn"
        )
    if name.lower() in _AMBIGUOUS:
        meanings = (
            f"{meaning!r} (largest value {float(format(meaning).max_finite):g})"
            for meaning in _AMBIGUOUS[name.lower()]
        )
        return ValueError(f"{where}: {name!r} is ambiguous, expected {' or '.join(meanings)}")
    names = closest(name)
    # `format` does not resolve block formats: they come last, called so.
    blocks = [repr(each) for each in names if each in BLOCKS and where == "format"]
    choices = [repr(each) for each in names if repr(each) not in blocks]
    if blocks:
        choices.append(f"the block format {' or '.join(blocks)}")
    question = f"did you mean {' or '.join(choices)}? " if choices else ""
    return ValueError(f"{where}: unknown format {name!r}; {question}`qtoolkit formats` lists all")


def closest(name: str) -> tuple[str, ...]:
    """Names of up to three formats or block formats that may be meant, the closest first.

    "mxfp8" gives those that begin with it, mxfp8_e4m3 and mxfp8_e5m2; "e4m3fm" those that are
    spelled alike, e4m3fn before others.
    """
    name = name.lower()
    if name in _MEANT:
        return _MEANT[name]
    longer = tuple(block for block in BLOCKS if len(name) >= 2 and block.startswith(name))
    if longer and not any(spelling.startswith(name) for spelling in BY_SPELLING):
        return longer[:3]
    spellings = {spelling: fmt.name for spelling, fmt in BY_SPELLING.items()}
    spellings |= {block: block for block in BLOCKS}
    if name.startswith("binary"):
        spellings |= {member: member for member in P3109_NAMES}
    close = difflib.get_close_matches(name, spellings, n=8, cutoff=0.55)
    return tuple(dict.fromkeys(spellings[spelling] for spelling in close))[:3]
