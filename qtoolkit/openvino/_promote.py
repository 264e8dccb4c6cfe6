"""ConvertPromoteTypes-14."""

from typing import Any, NoReturn

import jax
import numpy as np
from jax.typing import ArrayLike

from qtoolkit.formats import BOOL, FloatFormat, IntFormat
from qtoolkit.openvino._convert import convert_exactly
from qtoolkit.openvino._types import ELEMENT_TYPES, element_type, element_type_of

# The operator's own list; it names neither the smallest formats nor text.
_UNSUPPORTED = ("u2", "u3", "u6", "nf4", "f4e2m1", "f8e8m0", "string")
# Floats of one width: the type that both become.
_SAME_WIDTH = {
    frozenset({"f8e4m3", "f8e5m2"}): "f16",
    frozenset({"bf16", "f16"}): "f32",
}


def promoted_type(
    type0: Any,
    type1: Any,
    *,
    rank0: int | None = 1,
    rank1: int | None = 1,
    promote_unsafe: bool = False,
    pytorch_scalar_promotion: bool = False,
    u64_integer_promotion_target: Any = "f32",
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
       half the bits of an unsigned one. (Half, where the page would want twice: as the core does.)
    7. A signed and an unsigned integer: the signed integer with twice the bits of the unsigned one
       or those of the signed one, whatever is more; where promotion is safe, only if that is no
       widening. With u64: `u64_integer_promotion_target`, never safe.
    8. Different widths: the wider type.
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
    """
    where = "openvino.promoted_type"
    a = element_type(f"{where}: type0", type0)
    b = element_type(f"{where}: type1", type1)
    for name, rank in (("rank0", rank0), ("rank1", rank1)):
        if rank is not None and (not isinstance(rank, int | np.integer) or isinstance(rank, bool)):
            raise TypeError(f"{where}: {name}={rank!r}, expected an integer, or None if not known")
        if rank is not None and rank < 0:
            raise ValueError(f"{where}: {name}={rank}, expected 0 or more")
    flags = (promote_unsafe, pytorch_scalar_promotion, u64_integer_promotion_target)
    return _promoted(where, (a, b), (rank0, rank1), *flags)


def convert_promote_types(
    x0: ArrayLike,
    x1: ArrayLike,
    *,
    promote_unsafe: bool = False,
    pytorch_scalar_promotion: bool = False,
    u64_integer_promotion_target: Any = "f32",
) -> tuple[jax.Array, jax.Array]:
    """Both arrays in the element type that `promoted_type` names.

    Values follow `convert`, exactly: one rounding, no saturation, integers modulo 2**N. Shapes stay
    as they are and need not fit each other.

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
    """
    where = "openvino.convert_promote_types"
    types = element_type_of(where, "x0", x0), element_type_of(where, "x1", x1)
    flags = (promote_unsafe, pytorch_scalar_promotion, u64_integer_promotion_target)
    common = _promoted(where, types, (np.ndim(x0), np.ndim(x1)), *flags)
    return convert_exactly(where, x0, common), convert_exactly(where, x1, common)


def _promoted(
    where: str,
    types: tuple[str, str],
    ranks: tuple[int | None, int | None],
    promote_unsafe: bool,
    pytorch_scalar_promotion: bool,
    u64_integer_promotion_target: Any,
) -> str:
    for name, flag in (
        ("promote_unsafe", promote_unsafe),
        ("pytorch_scalar_promotion", pytorch_scalar_promotion),
    ):
        if not isinstance(flag, bool | np.bool_):
            raise TypeError(f"{where}: {name}={flag!r}, expected True or False")
    u64_target = element_type(
        f"{where}: u64_integer_promotion_target", u64_integer_promotion_target
    )

    def refuse(reason: str) -> NoReturn:
        raise TypeError(f"{where}: {types[0]} and {types[1]}: {reason}")

    for name in types:  # rule 1 of `promoted_type`, the others in their order
        if name in _UNSUPPORTED:
            supported = ", ".join(each for each in ELEMENT_TYPES if each not in _UNSUPPORTED)
            refuse(f"the operator does not support {name}, expected one of {supported}")
    if "dynamic" in types:  # 2
        return "dynamic"
    a, b = types
    if a == b:  # 3
        return a
    fmt_a, fmt_b = (_format(name) for name in types)
    if BOOL in (fmt_a, fmt_b):  # 4
        return b if fmt_a == BOOL else a
    if isinstance(fmt_a, FloatFormat) != isinstance(fmt_b, FloatFormat):  # 5
        floating, integer = (a, b) if isinstance(fmt_a, FloatFormat) else (b, a)
        if not promote_unsafe and _format(floating).bits < 2 * _format(integer).bits:
            refuse(
                "integer input cannot be safely promoted to floating-point; "
                f"{integer} needs a float of {2 * _format(integer).bits} bits, or promote_unsafe"
            )
        return floating
    if pytorch_scalar_promotion:  # 6
        if None in ranks:
            return "dynamic"
        if (ranks[0] == 0) != (ranks[1] == 0):
            scalar, tensor = (a, b) if ranks[0] == 0 else (b, a)
            if not promote_unsafe and not _takes_scalar(_format(tensor), _format(scalar)):
                refuse(
                    f"scalar input of {scalar} cannot be PyTorch-like promoted to {tensor} using "
                    "safe promotion rules; set promote_unsafe"
                )
            return tensor
    if fmt_a.signed != fmt_b.signed:  # 7
        signed, unsigned = (fmt_a, fmt_b) if fmt_a.signed else (fmt_b, fmt_a)
        if unsigned.bits <= 32 and (promote_unsafe or 2 * unsigned.bits <= signed.bits):
            return f"i{max(2 * unsigned.bits, signed.bits)}"
        if not promote_unsafe:
            refuse(
                "unsigned integer input cannot be safely promoted into any supported signed "
                "integer; set promote_unsafe"
            )
        return u64_target
    if fmt_a.bits != fmt_b.bits:  # 8
        return a if fmt_a.bits > fmt_b.bits else b
    if not promote_unsafe:  # 9
        refuse(
            "unsupported input element types with given attributes: only a wider type holds both; "
            "set promote_unsafe"
        )
    return _SAME_WIDTH[frozenset(types)]


def _format(name: str) -> FloatFormat | IntFormat:
    fmt = ELEMENT_TYPES[name]
    assert isinstance(fmt, FloatFormat | IntFormat)
    return fmt


def _takes_scalar(tensor: FloatFormat | IntFormat, scalar: FloatFormat | IntFormat) -> bool:
    if tensor.signed == scalar.signed:
        return tensor.bits >= scalar.bits
    return tensor.signed and 2 * tensor.bits >= scalar.bits
