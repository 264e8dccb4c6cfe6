"""ConvertPromoteTypes-14."""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.typing import ArrayLike

from qtoolkit.formats import FloatFormat, FormatLike, IntFormat
from qtoolkit.openvino._convert import convert_exactly
from qtoolkit.openvino._types import ELEMENT_TYPES, element_type, element_type_of

_Number = FloatFormat | IntFormat
# The operator's own list; it names neither the smallest formats nor text.
_UNSUPPORTED = ("u2", "u3", "u6", "nf4", "f4e2m1", "f8e8m0", "string")
# Floats of one width: the type that both become.
_SAME_WIDTH = {
    frozenset({"f8e4m3", "f8e5m2"}): "f16",
    frozenset({"bf16", "f16"}): "f32",
}


def promoted_type(
    type0: FormatLike,
    type1: FormatLike,
    *,
    rank0: int | None = 1,
    rank1: int | None = 1,
    promote_unsafe: bool = False,
    pytorch_scalar_promotion: bool = False,
    u64_integer_promotion_target: FormatLike = "f32",
) -> str:
    """The element type that ConvertPromoteTypes gives to inputs of two element types.

    The first rule that applies decides; the order of the inputs does not matter:

    1. A type that is not supported (u2, u3, u6, nf4, f4e2m1, f8e8m0, string) raises.
    2. One is "dynamic": "dynamic".
    3. Both are the same: that type.
    4. One is "boolean": the other.
    5. A float and an integer: the float; where promotion is safe, only if it has at least twice the
       bits of the integer.
    6. With `pytorch_scalar_promotion`: "dynamic" if a rank is not known; if one input alone has
       rank 0, the type of the other one. Where promotion is safe, that type must have at least the
       bits of the scalar's at the same signedness (floats are signed), or be signed with at least
       half the bits of an unsigned scalar: an i8 array takes a u16 scalar, as in OpenVINO's core.
       (The page asks for twice the bits of the scalar, i32 for u16.)
    7. A signed and an unsigned integer: the signed integer with twice the bits of the unsigned one
       or those of the signed one, whatever is more; where promotion is safe, only if that is no
       widening. With u64: `u64_integer_promotion_target`, never safe.
    8. Different widths: the type of more bits.
    9. f8e4m3 and f8e5m2: f16; f16 and bf16: f32; neither is safe.

    Args:
      type0, type1: Element types of OpenVINO by name, upper or lower case, or dtypes.
      rank0, rank1: Numbers of axes of the inputs; None where not known.
      promote_unsafe: Whether to promote where it may lose precision or widens both.
      pytorch_scalar_promotion: Whether arrays decide over scalars of the same kind.
      u64_integer_promotion_target: What u64 and a signed integer become; any element type.

    Returns:
      The name of the element type.

    Raises:
      TypeError: A type that is not supported, or a promotion that is not safe, with the reason;
        an argument of another type.
      ValueError: No such element type; a negative rank.

    Source: OpenVINO 2026, ConvertPromoteTypes-14, and where its page is not definite (half the
    bits in rule 6) its core, wheel 2026.4.1.

    Examples:
      >>> qt.openvino.promoted_type("i8", "f32")
      'f32'
      >>> qt.openvino.promoted_type("i8", "u8", promote_unsafe=True)
      'i16'
      >>> qt.openvino.promoted_type("f16", "bf16", promote_unsafe=True)
      'f32'
    """
    where = "openvino.promoted_type"
    a = element_type(f"{where}: type0", type0)
    b = element_type(f"{where}: type1", type1)
    for name, rank in (("rank0", rank0), ("rank1", rank1)):
        if rank is not None and (not isinstance(rank, int | np.integer) or isinstance(rank, bool)):
            raise TypeError(f"{where}: {name}={rank!r}, expected an integer, or None if not known")
        if rank is not None and rank < 0:
            raise ValueError(f"{where}: {name}={rank}, expected 0 or more")
    flags = _flags(where, promote_unsafe, pytorch_scalar_promotion, u64_integer_promotion_target)
    return _promoted(where, (a, b), (rank0, rank1), flags)


def convert_promote_types(
    x0: ArrayLike,
    x1: ArrayLike,
    *,
    promote_unsafe: bool = False,
    pytorch_scalar_promotion: bool = False,
    u64_integer_promotion_target: FormatLike = "f32",
) -> tuple[jax.Array, jax.Array]:
    """Convert both arrays to the element type that `promoted_type` gives.

    Values follow `convert`, exactly: one rounding, no saturation, integers modulo 2**N. The shapes
    do not change and need not broadcast.

    Args:
      x0, x1: Arrays of any dtype that the operator supports, any shapes; or Python's numbers, which
        are scalars of 64 bits.
      promote_unsafe, pytorch_scalar_promotion, u64_integer_promotion_target: As in `promoted_type`.

    Returns:
      Two arrays with the shapes of `x0` and `x1` and the dtype of the promoted element type. Works
      under `jit` and `vmap`.

    Raises:
      TypeError: As `promoted_type`; or as `convert` to the promoted type.
      ValueError: As `promoted_type`.

    Gradient: as `convert` to the promoted type.

    Source: as `promoted_type`.

    Examples:
      >>> x, y = qt.openvino.convert_promote_types(jnp.int8([1, 2]), jnp.asarray([0.5]))
      >>> x, y
      (Array([1., 2.], dtype=float32), Array([0.5], dtype=float32))
    """
    where = "openvino.convert_promote_types"
    types = element_type_of(where, "x0", x0), element_type_of(where, "x1", x1)
    flags = _flags(where, promote_unsafe, pytorch_scalar_promotion, u64_integer_promotion_target)
    common = _promoted(where, types, (np.ndim(x0), np.ndim(x1)), flags)
    return convert_exactly(where, x0, common), convert_exactly(where, x1, common)


class _Flags(NamedTuple):
    """The operator's attributes, checked; `u64_target` is the name of an element type."""

    promote_unsafe: bool
    pytorch_scalar_promotion: bool
    u64_target: str


def _flags(
    where: str, promote_unsafe: Any, pytorch_scalar_promotion: Any, u64_target: Any
) -> _Flags:
    for name, flag in (
        ("promote_unsafe", promote_unsafe),
        ("pytorch_scalar_promotion", pytorch_scalar_promotion),
    ):
        if not isinstance(flag, bool | np.bool_):
            raise TypeError(f"{where}: {name}={flag!r}, expected True or False")
    u64_target = element_type(f"{where}: u64_integer_promotion_target", u64_target)
    return _Flags(bool(promote_unsafe), bool(pytorch_scalar_promotion), u64_target)


def _promoted(
    where: str, types: tuple[str, str], ranks: tuple[int | None, int | None], flags: _Flags
) -> str:
    """The type that the rules of `promoted_type` give; a comment names the rule of each step."""
    refused = f"{where}: {types[0]} and {types[1]}: "
    for name in types:
        if name in _UNSUPPORTED:  # rule 1
            supported = ", ".join(each for each in ELEMENT_TYPES if each not in _UNSUPPORTED)
            raise TypeError(
                f"{refused}the operator does not support {name}, expected one of {supported}"
            )
    common, danger = _common_type(types, ranks, flags)
    if danger and not flags.promote_unsafe:
        raise TypeError(refused + danger)
    return common


def _common_type(
    types: tuple[str, str], ranks: tuple[int | None, int | None], flags: _Flags
) -> tuple[str, str]:
    """The type by rules 2 to 9, and why promoting to it is not safe; "" if it is."""
    a, b = types
    if "dynamic" in types:  # rule 2
        return "dynamic", ""
    if a == b:  # rule 3
        return a, ""
    if "boolean" in types:  # rule 4
        return b if a == "boolean" else a, ""
    fmt_a, fmt_b = _format(a), _format(b)
    if isinstance(fmt_a, FloatFormat) != isinstance(fmt_b, FloatFormat):  # rule 5
        floating, integer = types if isinstance(fmt_a, FloatFormat) else (b, a)
        needed = 2 * _format(integer).bits
        danger = (
            f"integer input cannot be safely promoted to floating-point; {integer} needs a float "
            f"of {needed} bits, or promote_unsafe"
        )
        return floating, danger if _format(floating).bits < needed else ""
    if flags.pytorch_scalar_promotion and None in ranks:  # rule 6
        return "dynamic", ""
    if flags.pytorch_scalar_promotion and (ranks[0] == 0) != (ranks[1] == 0):
        return _of_array_and_scalar(*(types if ranks[1] == 0 else (b, a)))
    if fmt_a.signed != fmt_b.signed:  # rule 7
        signed, unsigned = (fmt_a, fmt_b) if fmt_a.signed else (fmt_b, fmt_a)
        bits = max(2 * unsigned.bits, signed.bits)
        danger = (
            "unsigned integer input cannot be safely promoted into any supported signed integer; "
            "set promote_unsafe"
        )
        if unsigned.bits > 32:
            return flags.u64_target, danger
        return f"i{bits}", danger if bits > signed.bits else ""
    if fmt_a.bits != fmt_b.bits:  # rule 8
        return a if fmt_a.bits > fmt_b.bits else b, ""
    return _SAME_WIDTH[frozenset(types)], (  # rule 9
        "unsupported input element types with given attributes: only a type of more bits holds "
        "both; set promote_unsafe"
    )


def _of_array_and_scalar(array: str, scalar: str) -> tuple[str, str]:
    to, scalar_format = _format(array), _format(scalar)
    if to.signed == scalar_format.signed:
        is_safe = to.bits >= scalar_format.bits
    else:
        is_safe = to.signed and 2 * to.bits >= scalar_format.bits
    danger = (
        f"scalar input of {scalar} cannot be PyTorch-like promoted to {array} using safe promotion "
        "rules; set promote_unsafe"
    )
    return array, "" if is_safe else danger


def _format(name: str) -> _Number:
    fmt = ELEMENT_TYPES[name]
    assert isinstance(fmt, FloatFormat | IntFormat)
    return fmt
