"""Block formats: elements that share scales, as frozen data, and those that are published."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from qtoolkit.formats._element import check_fields, hashed_once, plain_number
from qtoolkit.formats._float import FloatFormat
from qtoolkit.formats._format import BLOCKS, format
from qtoolkit.formats._int import IntFormat
from qtoolkit.formats._names import E2M1FN, FLOAT32, Format, FormatLike

POWER_RULES = ("floor", "ceil", "rceil", "even", "below")
QUOTIENT_RULES = ("amax", "range", "four_over_six")
RULES = (*POWER_RULES, *QUOTIENT_RULES)
# With elements beyond this, nearly the range of float32, a scale, amax / largest, or an element
# times its scale could leave float32.
_LARGEST_SCALED = Fraction(2) ** 100

# The scales that are tried for a block, from its amax and the largest element: see `BlockFormat`.
ScaleRule: TypeAlias = Callable[[Any, float], Any]


@hashed_once
@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """Elements of one format in blocks that share a scale: x ~ q * scale. Frozen, hashable.

    Scaling per tensor, channel and token are block shapes, too: see `tensor`, `channel`, `token`.

    Attributes:
      element: The format of q, or any spelling of one.
      block: Lengths of a block along `axes`; None for the whole axis. The last block of an axis may
        be shorter.
      axes: The axes to which the lengths in `block` belong, negative ones counted from the end;
        None for the last axes. See `along`.
      other_axes: Length of a block along each axis that is not in `axes`: 1, so that each index has
        scales of its own, or None for the whole axis.
      scale: The format that scales are rounded to, or any spelling of one: a float format that
        float32 holds and that has a NaN, the scale of a block with a NaN whose elements have none.
        Scales are positive; a sign bit is allowed and never set. None: elements have no scale.
      rule: How the scale of a block follows from amax, the largest finite `|x|` in it, and from
        `largest`, the largest element; see below. None chooses "amax" where scales have a mantissa,
        else "floor" for integers, "even" for floats of one or two exponent bits and "rceil" for all
        other elements. Or a function of your own, see below.
      tensor_scale: The format of a second scale, one for the whole tensor, or any spelling. It is
        the amax of the tensor over `largest` and the largest scale: amax / (6 * 448) in NVFP4. What
        the rule gives is divided by it before it is rounded to `scale`, so the block with that amax
        has the scale 448. None: no second scale.
      tensor_scale_divides: Whether x ~ q * scale / tensor scale, with 6 * 448 / amax as the tensor
        scale of NVFP4, as in compressed-tensors.
      zero_point: Whether integers are asymmetric: x ~ (q - zero point) * scale. Scale and zero
        point map the range of the block, widened to include 0, to that of the integers: -1 to 4.1
        in uint8 has the scale 5.1 / 255 = 0.02 and the zero point 50.
      element_exponent: An element stands for q * 2**element_exponent: -6 for MXINT8.
      narrow_range: Whether integers do not use their lowest value: MXINT8 has no -128.
      amax_epsilon: Replaces a smaller amax: with 1e-4 in E4M3FN no scale is below 1e-4 / 448.

    The rules, and the scales of blocks of E4M3FN (`largest` is 448) whose amax is 300, 460 and 500:

      "amax"   amax / largest, rounded to nearest in `scale`                  0.6696, 1.027, 1.116
      "range"  amax over half of the range of the element, 127.5 for int8     0.6696, 1.027, 1.116
      "floor"  2**(floor(log2(amax)) - floor(log2(largest))), as OCP MX; may clamp         1, 1, 1
      "ceil"   2**(ceil(log2(amax)) - floor(log2(largest)))                                2, 2, 2
      "rceil"  2**ceil(log2(amax / largest)), the smallest power of two that never clamps  1, 2, 2
      "even"   "floor" after amax is rounded to the mantissa of the element: 448 and 512   1, 1, 2
      "below"  2**(floor(log2(amax / largest)) + 1): as "rceil", but 2 for an amax of 448  1, 2, 2

    Powers of two are exact: exponent bits decide, no logarithm is computed.

    "four_over_six" is a rule for E2M1: amax / 6 or amax / 4, so that the largest element becomes 6
    or 4, whichever has the smaller squared error in the block; of equal ones amax / 6. A second
    scale is amax / (6 * 256), so that E4M3 holds the scale of either. `spec("nvfp4").with_(
    rule="four_over_six")` is what was published. Source: arXiv:2512.02010.

    A function `rule(amax, largest)` gets float32 amaxes above 0 and a float, and returns the scale,
    or a tuple of scales to choose from in the same way, elementwise by operations of JAX: `lambda
    amax, largest: (amax / largest, 0.8 * amax / largest)`. It must be hashable, as functions are.
    What knows amax alone, such as static and delayed scaling, takes the first scale.

    Examples:
      >>> spec = qt.BlockFormat(element="e4m3fn", block=(2,), scale="e8m0fnu")
      >>> q = qt.quantize(jnp.asarray([300.0, 1.0, 460.0, 500.0]), spec)
      >>> q.scale  # 300 and 500 are the largest of their blocks
      Array([1, 2], dtype=float8_e8m0fnu)
      >>> q.dequantize()
      Array([288.,   1., 448., 512.], dtype=float32)
      >>> qt.BlockFormat.channel("int8").scale_shape((64, 128))
      (1, 128)
    """

    element: Format
    block: tuple[int | None, ...] = ()
    axes: tuple[int, ...] | None = None
    other_axes: int | None = 1
    scale: FloatFormat | None = FLOAT32
    rule: str | ScaleRule | None = None
    tensor_scale: FloatFormat | None = None
    tensor_scale_divides: bool = False
    zero_point: bool = False
    element_exponent: int = 0
    narrow_range: bool = False
    amax_epsilon: float = 0.0

    if TYPE_CHECKING:  # what may be given; the attributes are what `__post_init__` makes of it

        def __init__(
            self,
            *,
            element: FormatLike,
            block: Sequence[int | None] = (),
            axes: Sequence[int] | None = None,
            other_axes: int | None = 1,
            scale: FormatLike | None = FLOAT32,
            rule: str | ScaleRule | None = None,
            tensor_scale: FormatLike | None = None,
            tensor_scale_divides: bool = False,
            zero_point: bool = False,
            element_exponent: int = 0,
            narrow_range: bool = False,
            amax_epsilon: float = 0.0,
        ) -> None: ...

    def __post_init__(self) -> None:
        for field in ("element", "scale", "tensor_scale"):
            if getattr(self, field) is not None or field == "element":
                object.__setattr__(self, field, format(getattr(self, field)))
        self._check_blocks()
        for field in ("scale", "tensor_scale"):
            self._check_scale(field)
        self._check_rule()
        if self.scale is not None:
            self._check_element()
        if self.zero_point:
            self._check_zero_point()

    @classmethod
    def tensor(cls, element: FormatLike, **fields: Any) -> "BlockFormat":
        """One scale for all elements.

        Args:
          element: As the attribute; so are `fields`: scale=None, zero_point=True and so on.

        Raises:
          TypeError, ValueError: As `BlockFormat`.
        """
        return cls(element=element, other_axes=None, **fields)

    @classmethod
    def channel(cls, element: FormatLike, axis: int = -1, **fields: Any) -> "BlockFormat":
        """One scale for each index of `axis`. Arguments and errors: as `tensor`."""
        return cls(element=element, block=(1,), axes=(axis,), other_axes=None, **fields)

    @classmethod
    def token(cls, element: FormatLike, axis: int = -1, **fields: Any) -> "BlockFormat":
        """One scale for each vector along `axis`. Arguments and errors: as `tensor`."""
        return cls(element=element, block=(None,), axes=(axis,), **fields)

    def with_(self, **fields: Any) -> "BlockFormat":
        """The same with other values of some fields; a rule that was the default one follows them.

        Raises:
          TypeError: No such field.
          ValueError: As `BlockFormat`.

        Examples:
          >>> qt.spec("mxfp4").with_(block=(16,)).name
          'e2m1fn by blocks of 16, scale=e8m0fnu'
        """
        check_fields(self, fields)
        if self.rule == self._default_rule():
            fields.setdefault("rule", None)
        return dataclasses.replace(self, **fields)

    def along(self, *axes: int) -> "BlockFormat":
        """The same blocks along other axes, one for each length: `spec("mxfp4").along(0)`.

        Raises:
          ValueError: Other than as many different integers as `block` has lengths.
        """
        return dataclasses.replace(self, axes=axes)

    @functools.cached_property
    def name(self) -> str:
        """The published name, "mxfp4", else a description, "int8 by channel"; along 0 "mxfp4@0"."""
        at = "" if self.axes is None else f"@{','.join(map(str, self.axes))}"
        published = _published_name(dataclasses.replace(self, axes=None))
        if published is None and self.tries_scales:
            published = _published_name(dataclasses.replace(self, axes=None, rule=None))
            if published is not None:
                at += f", rule={self._rule_name}"
        return self._description(at) if published is None else published + at

    @property
    def largest(self) -> Fraction:
        """What the largest code stands for, without a scale: 448 for E4M3FN, 127/64 for MXINT8."""
        return self.element.max_finite * Fraction(2) ** self.element_exponent

    @property
    def tries_scales(self) -> bool:
        """Whether the elements of a block, not its amax alone, decide on its scale."""
        return self.rule == "four_over_six" or callable(self.rule)

    @property
    def largest_scale(self) -> Fraction:
        """With a second scale, the scale of the block that has the amax of the tensor."""
        assert self.scale is not None
        # 256 and 1.5 * 256 are both in E4M3: the block may be divided by 6 or by 4.
        return Fraction(256) if self.rule == "four_over_six" else self.scale.max_finite

    @property
    def has_powers(self) -> bool:
        """Whether the format of the scales holds nothing but powers of two, as E8M0."""
        return self.scale is not None and self.scale.mantissa_bits == 0

    def block_lengths(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The length of a block along each axis of an array.

        Raises:
          ValueError: An axis is out of range, empty, or shorter than a block; or, where it is
            symbolic, not known to be as long.
        """
        rank = len(shape)
        if 0 in shape:
            raise ValueError(f"{self.name}: shape {shape} is empty, expected at least one element")
        axes = self.axes if self.axes is not None else tuple(range(-len(self.block), 0))
        if len(axes) > rank:
            got = f"shape {shape}" if rank else "a scalar"
            raise ValueError(
                f"{self.name}: got {got}, expected {len(axes)} or more axes for its blocks; "
                f"reshape it, or use {self.element.name!r}, which has one scale for the tensor"
            )
        lengths: list[int | None] = [self.other_axes] * rank
        used = set()
        for axis, length in zip(axes, self.block, strict=True):
            if not -rank <= axis < rank or axis % rank in used:
                raise ValueError(
                    f"{self.name}: blocks along axes {axes} of an array of shape {shape}, expected "
                    f"different axes from {-rank} to {rank - 1}; choose them with .along(...)"
                )
            used.add(axis % rank)
            if length is not None and self._is_longer(length, axis, shape):
                raise ValueError(
                    f"{self.name}: a block has {length} elements along axis {axis}, and shape "
                    f"{shape} only {shape[axis]}; use a shorter block"
                )
            lengths[axis] = length
        return tuple(
            n if length is None else length for n, length in zip(shape, lengths, strict=True)
        )

    def _is_longer(self, length: int, axis: int, shape: tuple[int, ...]) -> bool:
        try:
            return bool(length > shape[axis])
        except Exception as error:  # JAX's, which is not imported here: a symbolic size
            raise ValueError(
                f"{self.name}: a block has {length} elements along axis {axis}, and shape {shape} "
                f"has {shape[axis]}, expected a size that is known, or known to be {length} or "
                "more; export for that, or cut blocks along other axes"
            ) from error

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The number of blocks along each axis of an array. Raises: as `block_lengths`."""
        return tuple(-(-n // b) for n, b in zip(shape, self.block_lengths(shape), strict=True))

    def __str__(self) -> str:
        return self.name

    @property
    def _rule_name(self) -> str:
        return str(getattr(self.rule, "__name__", self.rule))

    def _description(self, at: str) -> str:
        if self.scale is None:
            return f"{self.element.name}, unscaled"
        shapes = {((), None): "tensor", ((1,), None): "channel", ((None,), 1): "token"}
        sizes = "x".join("all" if n is None else str(n) for n in self.block)
        sizes += " across all other axes" if self.other_axes is None else ""
        by = shapes.get((self.block, self.other_axes), f"blocks of {sizes}")
        changes = [
            f"{field.name}={getattr(value, 'name', value)}"
            for field in dataclasses.fields(self)
            if field.name not in ("element", "block", "axes", "other_axes", "rule")
            and (value := getattr(self, field.name)) != field.default
        ]
        if self.rule != self._default_rule():
            changes.append(f"rule={self._rule_name}")
        return ", ".join([f"{self.element.name} by {by}{at}", *changes])

    def _error(self, message: str) -> ValueError:
        return ValueError(f"BlockFormat of {self.element.name}: {message}")

    def _check_blocks(self) -> None:
        for field in ("block", "axes"):
            value = getattr(self, field)
            if value is None and field == "axes":
                continue
            if not isinstance(value, tuple | list):
                raise TypeError(
                    f"BlockFormat of {self.element.name}: {field}={value!r}, expected a tuple, "
                    f"e.g. ({value},)"
                )
            object.__setattr__(self, field, tuple(map(plain_number, value)))
        for length in self.block:
            if length is not None and not (_is_int(length) and length >= 1):
                raise self._error(f"block={self.block}, expected positive integers or None")
        if self.axes is not None:
            if not all(map(_is_int, self.axes)) or len(set(self.axes)) < len(self.axes):
                raise self._error(f"axes={self.axes}, expected different integers")
            if len(self.axes) != len(self.block):
                raise self._error(
                    f"{len(self.axes)} axes, {self.axes}, for a block with {len(self.block)} "
                    f"lengths, {self.block}; expected one axis for each length"
                )
        if not (self.other_axes is None or (_is_int(self.other_axes) and self.other_axes == 1)):
            raise self._error(f"other_axes={self.other_axes!r}, expected 1 or None")
        if not self.block and self.other_axes == 1 and self.scale is not None:
            raise self._error(
                "block=() and other_axes=1 make a scale for each element; expected a block, or "
                "BlockFormat.tensor(...), .channel(...) or .token(...)"
            )

    def _check_scale(self, field: str) -> None:
        scale = getattr(self, field)
        if scale is None:
            return
        expected = "expected a float format with a NaN that float32 holds, e.g. float32 or e8m0fnu"
        if not isinstance(scale, FloatFormat) or not scale.has_nan:
            raise self._error(f"{field}={scale.name} cannot be a scale; {expected}")
        fits = scale.max_finite <= FLOAT32.max_finite and scale.mantissa_bits <= 23
        if not fits or scale.min_positive < FLOAT32.min_positive:
            raise self._error(f"{field}={scale.name} has values beyond float32; {expected}")

    def _check_rule(self) -> None:
        if self.rule is None:
            object.__setattr__(self, "rule", self._default_rule())
        try:
            hash(self.rule)
        except TypeError:
            raise TypeError(
                f"BlockFormat of {self.element.name}: rule={self.rule!r} is not hashable, expected "
                "a function, or a frozen dataclass with __call__(self, amax, largest)"
            ) from None
        if not callable(self.rule) and self.rule not in RULES:
            raise self._error(
                f"rule={self.rule!r}, expected one of {', '.join(RULES)}, or a function of amax "
                "and the largest element"
            )
        if self.rule in QUOTIENT_RULES and self.has_powers:
            raise self._error(
                f"rule={self.rule!r} with {self.scale.name} scales, which are powers of two; "  # type: ignore[union-attr]
                f"expected one of {', '.join(POWER_RULES)}"
            )
        if self.rule == "even" and not isinstance(self.element, FloatFormat | IntFormat):
            raise self._error("rule='even' needs an element with mantissa bits, not a table")
        if self.narrow_range and not (isinstance(self.element, IntFormat) and self.element.signed):
            raise self._error("narrow_range needs signed integers")
        if self.rule == "range" and not self.element.signed:
            raise self._error("rule='range' needs signed elements: the scales are symmetric")
        self._check_tensor_scale()
        reaches_384 = self.scale is not None and self.scale.max_finite >= 384
        if self.rule == "four_over_six" and not (self.element == E2M1FN and reaches_384):
            raise self._error(
                "rule='four_over_six' needs elements of e2m1fn, whose largest two are 4 and 6, and "
                "scales that reach 384, as those of nvfp4"
            )
        is_number = isinstance(self.amax_epsilon, int | float)
        if not is_number or not 0 <= self.amax_epsilon <= FLOAT32.max_finite:
            raise self._error(f"amax_epsilon={self.amax_epsilon!r}, expected a float32 from 0 up")

    def _check_tensor_scale(self) -> None:
        if self.tensor_scale_divides and self.tensor_scale is None:
            raise self._error("tensor_scale_divides needs a tensor_scale")
        is_plain = self.rule in ("amax", "four_over_six") or callable(self.rule)
        if self.tensor_scale is not None and (self.scale is None or not is_plain):
            raise self._error(
                "tensor_scale needs a scale with rule='amax', 'four_over_six' or a function"
            )
        if self.tensor_scale is not None and self.scale is not None and is_wide(self.scale):
            raise self._error(
                f"tensor_scale with {self.scale.name} scales, which need none; expected scales of "
                "a smaller range, e.g. e4m3fn"
            )

    def _default_rule(self) -> str:
        if not self.has_powers:
            return "amax"
        if isinstance(self.element, IntFormat):
            return "floor"
        narrow = isinstance(self.element, FloatFormat) and self.element.exponent_bits <= 2
        return "even" if narrow else "rceil"

    def _check_element(self) -> None:
        element = self.element
        is_bool = isinstance(element, IntFormat) and element.is_bool
        if is_wide(element) or element.mantissa_bits > 23 or is_bool:
            raise self._error(
                f"element={element.name} cannot be scaled: it has the range of float32, or more "
                "significant bits, or is bool; expected another element, or scale=None"
            )
        if element.max_finite <= 0 and not self.zero_point:
            raise self._error(
                f"element={element.name} cannot be scaled: it has no positive value, which "
                "amax could become; expected an element of more bits, a zero_point, or scale=None"
            )
        if not _is_int(self.element_exponent) or abs(self.element_exponent) > 24:
            raise self._error(f"element_exponent={self.element_exponent}, expected -24 to 24")
        if self.element_exponent and not self.has_powers:
            raise self._error(
                "element_exponent needs scales that are powers of two by their format, e.g. e8m0fnu"
            )

    def _check_zero_point(self) -> None:
        simple = self.rule == "amax" and self.tensor_scale is None
        simple = simple and not (self.element_exponent or self.narrow_range or self.amax_epsilon)
        is_integer = isinstance(self.element, IntFormat) and self.element.bits <= 16
        if not is_integer or self.scale is None or not simple:
            raise self._error(
                "zero_point needs integers of up to 16 bits and a scale with rule='amax', without "
                "tensor_scale, element_exponent, narrow_range or amax_epsilon"
            )


def is_wide(fmt: Format) -> bool:
    """Whether `fmt` has values above 2**100 or below 2**-100."""
    return fmt.max_finite > _LARGEST_SCALED or fmt.min_positive < 1 / _LARGEST_SCALED


def _is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _published_name(fmt: BlockFormat) -> str | None:
    return next((name for name, published in BLOCKS.items() if published == fmt), None)
