"""Moments of any optimizer in 8 bits."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import GradientTransformation, GradientTransformationExtraArgs

from qtoolkit.casts import Stochastic
from qtoolkit.casts.internal import FLOATS, check_rounding, exact_float32, serializable
from qtoolkit.formats import BlockFormat, Rules, TableFormat
from qtoolkit.formats.internal import values_of_rules
from qtoolkit.optim._arguments import check_integer, check_transform, key_words
from qtoolkit.optim._moments import (
    MomentLike,
    check_restored,
    checked_rules,
    formats,
    is_float,
    leaves,
)
from qtoolkit.scaling import QArray, quantize


@serializable
class QuantizedState(NamedTuple):
    """The state of `quantize_state`.

    Attributes:
      seed: uint32 scalar, of all random bits.
      step: uint32 scalar, the number of updates.
      inner: The state of the wrapped transform, its moments as QArrays.
    """

    seed: jax.Array
    step: jax.Array
    inner: Any


def quantize_state(
    tx: GradientTransformation,
    spec: MomentLike | Rules[Any],
    *,
    rounding: str | Stochastic = "stochastic",
    seed: int = 0,
    min_size: int = 4096,
) -> GradientTransformationExtraArgs:
    """Store the moments of `tx` in few bits; its update gets them as float32.

        tx = qtoolkit.optim.quantize_state(optax.adamw(1e-3), "e4m3fn")
        state = tx.init(params)                               # 0.26 of the bytes of optax's own
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)

    Every float array of the state with `min_size` elements or more becomes a `QArray` in blocks of
    128 elements with a float32 scale each. Scalars, counts, keys and small arrays are not
    quantized; copies of parameters and accumulated gradients in states of optax only by a rule.

    Second moments are never negative. They are stored as square roots in an unsigned format that
    uses the sign bit as one more mantissa bit (E4M3 becomes unsigned E4M4). A positive one never
    becomes zero, since Adam divides by that root. By default rounding is stochastic: a running mean
    that moves by 0.1 % a step would stand still if 8 bits were rounded to nearest, but moves as it
    should on average. The random bits are a hash of `seed`, step, path and element.

    Args:
      tx: Any transform of gradients, with further arguments of its update or without.
      spec: An element format, "e4m3fn", or a `BlockFormat`, as for `quantize`; its blocks are laid
        along the last axes of each array, whatever the shape. Or `Rules` of these and of
        `SecondMoment` over paths in the state such as "0/nu/dense/kernel"; None: not quantized.
      rounding: As in `quantize`.
      seed: 0 to 2**32 - 1. Under `vmap` and in `shard_map` give each its own, as
        `state._replace(seed=...)`, else all draw the same bits.
      min_size: Smaller arrays stay as they are.

    Returns:
      A transform whose state is a `QuantizedState`. Non-finite moments stay non-finite. The layout
      of the state follows from shapes alone, so it can be restored on any mesh.

    Raises:
      ValueError: `spec` cannot hold a moment: no sign, no zero, zero points, more than 16 bits;
        blocks do not fit an array; a rule matches nothing; the arguments are out of range; or an
        update gets a state in another element format, such as a restored one.
      TypeError: An argument of another kind; or the state of `tx` is quantized already.

    Source: arXiv:2110.02861 (8-bit optimizers: blocks, and the size below which nothing is
    quantized); arXiv:1502.02551 (stochastic rounding of what moves by less than a step).

    Examples:
      >>> tx = qt.optim.quantize_state(optax.adam(1e-3), "e4m3fn")
      >>> moments = tx.init({"kernel": jnp.ones((64, 64))}).inner[0]
      >>> moments.mu["kernel"]
      QArray(e4m3fn by blocks of 2x64, float32[64,64]: codes uint8[64,64], scale float32[32,1])
      >>> moments.nu["kernel"].spec.element.name  # roots; the sign bit became one of mantissa
      'e4m3fn_unsigned'
    """
    check_transform("quantize_state", tx)
    rules = checked_rules(spec)
    rounding = check_rounding("quantize_state", rounding, "finite")
    _check_tables(rules, rounding)
    check_integer("quantize_state", "seed", seed, 0, 2**32 - 1)
    check_integer("quantize_state", "min_size", min_size, 0, 2**63 - 1)
    extended = optax.with_extra_args_support(tx)

    def init(params: Any) -> QuantizedState:
        inner = tx.init(_unbox(params))
        if any(isinstance(leaf.value, QArray) for leaf in leaves(inner)):
            raise TypeError(
                "quantize_state: the state of the transform holds QArrays already, expected plain "
                "arrays; quantize_state goes around a transform once"
            )
        words, step = jnp.uint32(seed), jnp.uint32(0)
        specs = formats(inner, rules, min_size)
        # To nearest, which compiles in half the time: initial moments are constants, and exact.
        return QuantizedState(words, step, _with_moments(inner, specs, "nearest_even", words, step))

    def update(
        updates: Any, state: QuantizedState, params: Any = None, **extra: Any
    ) -> tuple[Any, QuantizedState]:
        old = leaves(state.inner)
        check_restored(old, rules, min_size)
        is_narrow = any(
            isinstance(leaf.value, QArray) and leaf.value.dtype != jnp.float32 for leaf in old
        )
        unboxed, params = _unbox(updates), _unbox(params)
        numbers = _like(state.inner, [_dequantize(leaf.value) for leaf in old])
        # The transform gets moments in float32. If its own moments have fewer bits, it gets all
        # other arrays in float32, too: of two branches of `lax.cond` one may return a moment and
        # the other zeros like a gradient, and both must have one dtype.
        operands = unboxed, numbers, params
        if is_narrow:
            operands = jax.tree.map(lambda x: exact_float32(x) if is_float(x) else x, operands)
        changes, inner = extended.update(*operands, **extra)
        if is_narrow:
            # What the transform itself would have: its own dtypes, e.g. bfloat16.
            declared = _like(
                state.inner,
                [
                    jax.ShapeDtypeStruct(leaf.value.shape, leaf.value.dtype)
                    if isinstance(leaf.value, QArray)
                    else leaf.value
                    for leaf in old
                ],
            )
            of = jax.eval_shape(lambda *a: extended.update(*a, **extra), unboxed, declared, params)
            changes = jax.tree.map(lambda x, like: x.astype(like.dtype), changes, of[0])
        # Into the boxes again. `optax.lookahead` gives pairs, which no gradient is.
        boxes: Any = jax.tree.structure(updates)
        arrays = jax.tree.leaves(changes)
        if boxes.num_leaves == len(arrays):
            changes = jax.tree.unflatten(boxes, arrays)
        specs = [leaf.value.spec if isinstance(leaf.value, QArray) else None for leaf in old]
        step = state.step + jnp.uint32(1)
        dtypes = [getattr(leaf.value, "dtype", None) for leaf in old]
        stored = _with_moments(inner, specs, rounding, state.seed, step, dtypes)
        return changes, QuantizedState(state.seed, step, stored)

    return GradientTransformationExtraArgs(init, update)


def _unbox(tree: Any) -> Any:
    """Replace the Variables of `nnx`, boxes of one array each, by their arrays."""
    # `nnx.Optimizer` removes the boxes before an update but not before `init`, and would put all
    # parts of a QArray into one box.

    def is_box(node: Any) -> bool:
        return hasattr(node, "get_value")

    return jax.tree.map(lambda x: x.get_value() if is_box(x) else x, tree, is_leaf=is_box)


def _like(tree: Any, values: list[Any]) -> Any:
    """A tree in the structure of `tree`, with these values for its quantized and other arrays."""
    structure = jax.tree.structure(tree, is_leaf=lambda node: isinstance(node, QArray))
    return jax.tree.unflatten(structure, values)


def _with_moments(
    state: Any,
    specs: list[BlockFormat | None],
    rounding: str | Stochastic,
    seed: jax.Array,
    step: jax.Array,
    dtypes: list[Any] | None = None,
) -> Any:
    """A state with its moments quantized.

    Args:
      specs: For each leaf the format to which it is quantized; None: it is not quantized.
      seed, step: They determine the random bits, together with the path of each leaf.
      dtypes: The dtypes of the state before the update, e.g. bfloat16: the `QArray`s keep them, and
        other floats are rounded to them. None: the dtypes of the leaves.
    """
    new = leaves(state)
    if len(new) != len(specs):
        raise ValueError(
            f"quantize_state: the state of the transform has {len(new)} arrays after its update, "
            f"expected the {len(specs)} of its init"
        )
    values = []
    for (path, x, _), fmt, dtype in zip(new, specs, dtypes or [None] * len(specs), strict=True):
        if fmt is not None:
            is_random = isinstance(rounding, Stochastic)
            key = key_words(seed, step, path) if is_random else None
            x = _quantize(x, fmt, rounding, key, dtype or x.dtype)
        elif dtype in FLOATS and dtype != x.dtype:
            x = x.astype(dtype)
        values.append(x)
    return _like(state, values)


def _quantize(
    x: jax.Array, fmt: BlockFormat, rounding: str | Stochastic, key: jax.Array | None, dtype: Any
) -> QArray:
    """A moment as codes and scales. Of a second moment, in an unsigned format, the square root."""
    # An infinity is stored as NaN. If it saturated, the overflow of the moment would go unnoticed.
    # A positive second moment never becomes 0, because the update divides by it.
    values = exact_float32(x)
    values = jnp.where(jnp.isfinite(values), values, np.float32(np.nan))
    is_second = not fmt.element.signed
    if is_second:
        values = jnp.sqrt(values)  # NaN of a negative number
    q = quantize(values, fmt, rounding=rounding, key=key)
    codes = q.codes
    if is_second:  # code 1 is the smallest positive value
        codes = jnp.where((codes == 0) & (values > 0), np.ones((), codes.dtype), codes)
    return QArray(codes, q.scale, fmt, q.tensor_scale, None, dtype, q.lengths)


def _dequantize(value: Any) -> Any:
    """A leaf of the state as numbers: a `QArray` is dequantized to float32."""
    # Not to the dtype of the parameters: a bfloat16 mean that moves by 0.1 % a step would be
    # rounded back to its old value, before it could be rounded stochastically.
    if not isinstance(value, QArray):
        return value
    x = value.dequantize(jnp.float32)
    return x if value.spec.element.signed else x * x


def _check_tables(rules: Rules[Any], rounding: str | Stochastic) -> None:
    for fmt in (getattr(value, "spec", value) for value in values_of_rules(rules)):
        if isinstance(rounding, Stochastic) and isinstance(fmt.element, TableFormat):
            raise ValueError(
                f"quantize_state: stochastic rounding of {fmt.element.name}, a table, is not "
                "defined; expected a float or an integer format, e.g. 'e4m3fn'"
            )
