"""Which arrays of an optimizer's state are quantized, and to what blocks of what format."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import jax

from qtoolkit.casts.internal import FLOATS
from qtoolkit.formats import (
    BlockFormat,
    FloatFormat,
    IntFormat,
    Rules,
    Specials,
    SpecLike,
    TableFormat,
    spec,
)
from qtoolkit.optim._arguments import leaf_path
from qtoolkit.scaling import QArray

BLOCK = 128  # elements that share a scale where only a format is given
_MAX_BITS = 16

_SIGNED, _SECOND, _NOT_A_MOMENT = "signed moment", "second moment", "not a moment"

# Names of fields in optax's states that hold something else than signed moments: second moments, or
# parameters and gradients, which must not be rounded.
_BY_FIELD = {
    **dict.fromkeys(("mu", "trace", "ema", "m1", "m2", "exp_avg"), _SIGNED),
    **dict.fromkeys(("nu", "nu_max", "sum_of_squares", "e_g", "e_x", "exp_avg_sq"), _SECOND),
    **dict.fromkeys(("v_row", "v_col", "grad_sum_sq", "variance_grads_ema"), _SECOND),
    **dict.fromkeys(("init_params", "init_particles", "params", "params0", "x0"), _NOT_A_MOMENT),
    **dict.fromkeys(("acc_grads", "master"), _NOT_A_MOMENT),
    # Sums and means of the gradients of micro-batches, and the gradient of a line search.
    **dict.fromkeys(("grad_acc", "avg_grad", "mean_grads", "grad"), _NOT_A_MOMENT),
    "sum_sq_diff_grads": _NOT_A_MOMENT,
    # Of transforms of matrices: Muon's polynomial; GaLore's basis, which must stay orthonormal;
    # the differences of L-BFGS, whose products are curvatures.
    **dict.fromkeys(("ns_coeffs", "projector"), _NOT_A_MOMENT),
    **dict.fromkeys(("diff_params_memory", "diff_updates_memory", "weights_memory"), _NOT_A_MOMENT),
}
# States in which such a name means something else, by the name of their type: optax does not export
# them all.
_BY_TYPE: dict[str, dict[str, str]] = {
    "FactoredState": {"v": _SECOND},
    "ScaleByAdanState": {"n": _SECOND},
    "ScaleBySimplifiedAdEMAMixState": {"n": _SECOND},
    "ScaleByLBFGSState": {"updates": _NOT_A_MOMENT},
    "ScaleBySM3State": {"mu": _SECOND, "nu": _SIGNED},
    "ScaleByRpropState": {"step_sizes": _SECOND},  # which are positive
    "COCOBState": dict.fromkeys(("scale", "subgradients", "reward"), _SECOND),  # it divides by them
    "SophiaState": {"nu": _SIGNED},  # Hutchinson's estimate may be negative
    "ScheduleFreeState": {"z": _NOT_A_MOMENT},
    # SAM's cache holds the parameters while an adversarial step is taken.
    "SAMState": {"cache": _NOT_A_MOMENT},
    # The variance is nu - mu**2. If both were rounded, it might become negative.
    "ScaleByRStdDevState": {"mu": _NOT_A_MOMENT, "nu": _NOT_A_MOMENT},
    "ScaleByRStdDevWithCountState": {"mu": _NOT_A_MOMENT, "nu": _NOT_A_MOMENT},
}


@dataclasses.dataclass(frozen=True)
class SecondMoment:
    """A spec for arrays that are never negative, as a value of the `Rules` of `quantize_state`.

    `quantize_state` knows the second moments of optax's own transforms; this is for others.

        second = qtoolkit.optim.SecondMoment("e4m3fn")
        rules = qtoolkit.formats.Rules({"(^|/)nu/": second}, default="e5m2")
        tx = qtoolkit.optim.quantize_state(optax.adamw(1e-3), rules)
        state = tx.init(params)

    Attributes:
      spec: As in `quantize_state`. The sign bit of a signed format becomes one of mantissa.

    Examples:
      >>> rules = qt.Rules({"(^|/)nu/": qt.optim.SecondMoment("e4m3fn")})
      >>> tx = qt.optim.quantize_state(optax.adam(1e-3), rules)
      >>> moments = tx.init({"kernel": jnp.ones((64, 64))}).inner[0]
      >>> moments.mu["kernel"].dtype, moments.nu["kernel"].spec.element.name
      (dtype('float32'), 'e4m3fn_unsigned')
    """

    spec: SpecLike

    def __post_init__(self) -> None:
        object.__setattr__(self, "spec", without_sign(block_format("SecondMoment", self.spec)))


MomentLike: TypeAlias = SpecLike | SecondMoment


def block_format(where: str, like: SpecLike) -> BlockFormat:
    """The blocks that `like` stands for: its own, or `BLOCK` elements of an element format."""
    fmt = spec(like)
    if not isinstance(like, BlockFormat) and fmt.block == () and fmt.scale is not None:
        fmt = dataclasses.replace(fmt, block=(BLOCK,), other_axes=1)
    element = fmt.element
    if fmt.zero_point:
        raise ValueError(
            f"{where}: {fmt.name} has zero points, expected a symmetric format, e.g. 'int8'"
        )
    if element.bits > _MAX_BITS:
        raise ValueError(
            f"{where}: {element.name} has {element.bits} bits, expected at most {_MAX_BITS}, "
            "e.g. 'e4m3fn'; None in Rules excludes an array"
        )
    has_zero = isinstance(element, IntFormat) or (
        0 in element.finite if isinstance(element, TableFormat) else element.has_zero
    )
    if not has_zero:
        raise ValueError(
            f"{where}: {element.name} has no zero, with which every moment begins; expected a "
            "format that has one, e.g. 'e4m3fn'"
        )
    return fmt


def without_sign(fmt: BlockFormat) -> BlockFormat:
    """`fmt` with its elements' sign bit used as a mantissa bit: E4M3 becomes unsigned E4M4."""
    element = fmt.element
    if not element.signed:
        return fmt
    if isinstance(element, TableFormat):
        raise ValueError(
            f"SecondMoment: {element.name} is a table with negative numbers, expected a float or "
            "an integer format; write Rules({path: SecondMoment('e4m3fn')}, default=...)"
        )
    name = f"{element.name}_unsigned"
    fields: dict[str, Any] = {"name": name, "signed": False, "dtype_name": None, "spellings": ()}
    if isinstance(element, FloatFormat):
        fields["mantissa_bits"] = element.mantissa_bits + 1
        if element.specials is Specials.FNUZ:
            fields["specials"] = Specials.FN
    return dataclasses.replace(
        fmt, element=dataclasses.replace(element, **fields), narrow_range=False
    )


class Leaf(NamedTuple):
    """An array of an optimizer's state, with its path and its kind, see above."""

    path: str
    value: Any
    kind: str


def leaves(state: Any) -> list[Leaf]:
    """The leaves of a state in the order of `jax.tree.leaves`; a `QArray` is one leaf."""
    return list(_leaves(state, (), None))


def _leaves(state: Any, before: tuple[Any, ...], kind: str | None) -> Iterator[Leaf]:
    def stops(node: Any) -> bool:
        return isinstance(node, QArray) or _is_named_tuple(node)

    for keys, node in jax.tree_util.tree_flatten_with_path(state, is_leaf=stops)[0]:
        path = (*before, *keys)
        if not _is_named_tuple(node):
            yield Leaf(leaf_path(path), node, kind or _SIGNED)
            continue
        kinds = {**_BY_FIELD, **_BY_TYPE.get(type(node).__name__, {})}
        for name in node._fields:
            key = jax.tree_util.GetAttrKey(name)
            yield from _leaves(getattr(node, name), (*path, key), kind or kinds.get(name))


def _is_named_tuple(node: Any) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_fields")


def checked_rules(spec: MomentLike | Rules[Any]) -> Rules[Any]:
    """The argument of `quantize_state` as rules whose values are block formats."""

    def checked(value: MomentLike) -> BlockFormat | SecondMoment:
        if isinstance(value, SecondMoment):
            return value
        fmt = block_format("quantize_state", value)
        if fmt.element.signed:
            return fmt
        raise ValueError(
            f"quantize_state: {fmt.element.name} has no sign, and first moments are negative, too; "
            "expected a signed format, e.g. 'int8': second moments use its sign bit as one more "
            "bit of mantissa. For an array that is never negative write "
            "Rules({path: SecondMoment(...)})"
        )

    if isinstance(spec, Rules):
        return spec.map(checked)
    if isinstance(spec, SecondMoment):
        raise TypeError(
            "quantize_state: spec is a SecondMoment, expected what holds first moments, too; write "
            "Rules({path: SecondMoment(...)}, default='e4m3fn')"
        )
    return Rules({}, default=checked(spec))


def formats(state: Any, rules: Rules[Any], min_size: int) -> list[BlockFormat | None]:
    """The format of each of `leaves(state)`; None for leaves that stay unquantized."""
    arrays = leaves(state)
    floats = [leaf for leaf in arrays if is_float(leaf.value)]
    rules.check_used("quantize_state", [leaf.path for leaf in floats])
    return [_format(leaf, rules, min_size) if is_float(leaf.value) else None for leaf in arrays]


def is_float(value: Any) -> bool:
    return getattr(value, "dtype", None) in FLOATS


def format_by_rule(leaf: Leaf, rules: Rules[Any]) -> BlockFormat | None:
    """The format of a leaf, whatever its size and shape."""
    rule = rules.lookup(leaf.path)
    is_named = rules.match_index(leaf.path) is not None
    if rule is None or (leaf.kind == _NOT_A_MOMENT and not is_named):
        return None
    if isinstance(rule, SecondMoment):
        return spec(rule.spec)
    return without_sign(rule) if leaf.kind == _SECOND else rule


def _format(leaf: Leaf, rules: Rules[Any], min_size: int) -> BlockFormat | None:
    fmt = None if _is_small(leaf.value, min_size) else format_by_rule(leaf, rules)
    if fmt is None:
        return None
    try:
        return _fit_blocks(fmt, leaf.value.shape)
    except ValueError as error:
        raise ValueError(f"quantize_state: {leaf.path}: {error}") from None


def _is_small(x: Any, min_size: int) -> bool:
    return x.ndim == 0 or x.size < max(min_size, 1)


def check_restored(old: list[Leaf], rules: Rules[Any], min_size: int) -> None:
    """A restored state keeps its formats, so another `spec` would do nothing, silently."""
    for leaf in old:
        got = leaf.value.spec if isinstance(leaf.value, QArray) else None
        if got is None and (not is_float(leaf.value) or _is_small(leaf.value, min_size)):
            continue
        wanted = format_by_rule(leaf, rules)
        names = ["not quantized" if fmt is None else fmt.element.name for fmt in (got, wanted)]
        if names[0] != names[1]:
            raise ValueError(
                f"quantize_state: {leaf.path} of the state is {names[0]}, expected {names[1]}, as "
                "the spec of this transform says; restore the state with the spec that it was "
                "saved with, or begin with tx.init(params)"
            )


def _fit_blocks(fmt: BlockFormat, shape: tuple[int, ...]) -> BlockFormat:
    """`fmt` with blocks that fit an array of this shape, whatever its mesh.

    Blocks run along the last axis, and also along the axes before it if that is short: blocks of
    128 elements in an array of shape [4096, 3] are [42, 3]. Axes that are no multiple of a block
    are cut evenly: 300 into three times 100.
    """
    if fmt.axes is not None or None in fmt.block or fmt.block == ():
        fmt.block_lengths(shape)  # raises where they do not fit
        return fmt
    room = math.prod(length for length in fmt.block if length is not None)
    lengths: list[int] = []
    for n in reversed(shape):
        lengths.insert(0, -(-n // -(-n // room)))
        room //= lengths[0]
    return dataclasses.replace(fmt, block=tuple(lengths))
