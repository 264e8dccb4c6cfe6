"""GPTQ: kernels rounded channel by channel, each error made good by the channels that follow."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.linalg import solve_triangular

from qtoolkit import formats
from qtoolkit.casts import pack
from qtoolkit.casts.internal import (
    NEAREST,
    WIDTHS,
    check_differentiable,
    check_holds,
    exact_float32,
)
from qtoolkit.formats import BlockFormat, SpecLike
from qtoolkit.scaling._blocks import scale_shape
from qtoolkit.scaling._contraction import Contraction, check_inputs, with_block
from qtoolkit.scaling._elements import Scales
from qtoolkit.scaling._engine import (
    block_codes,
    block_values,
)
from qtoolkit.scaling._find_scales import find_scales, in_float32
from qtoolkit.scaling._hessian import Hessian
from qtoolkit.scaling._observer import check_number
from qtoolkit.scaling._qarray import QArray

Array = jax.Array
_STEP = 128  # channels between two matmuls with all errors so far, where blocks do not say


def gptq(
    w: Array,
    spec: SpecLike,
    hessian: Hessian,
    *,
    axis: int | tuple[int, ...] | Contraction = 0,
    damping: float = 0.01,
    act_order: bool = False,
    packed: bool = False,
    where: str = "gptq",
) -> QArray:
    """Quantize a kernel by GPTQ: the error of `x @ w` is minimized, not that of `w`.

    Channels are rounded one after the other. The error of each is made good, as far as their inputs
    are correlated, by the channels that are still high precision. A block gets its scale when it is
    reached, from what its channels have become by then. All formats: integers with and without zero
    points, floats, tables; scales by tensor, channel, group, MX and NVFP4 blocks.

    Args:
      w: The kernel, float32, float16 or bfloat16.
      spec: A format, as in `quantize`. Blocks lie along `axis` unless it says otherwise.
      hessian: Of the inputs. Its dtype is that of the computation.
      axis: The axis that the matmul sums over; or several, in the order of the input's channels.
      damping: This fraction of the mean of H's diagonal is added to the diagonal.
      act_order: Whether channels are rounded in descending order of their mean square. Scales then
        follow from `w` as it is.
      packed: As in `quantize`.
      where: What messages of errors begin with.

    Returns:
      A `QArray` in the shape and dtype of `w`. Channels whose inputs were all zeros are rounded to
      nearest.

    Raises:
      TypeError: `w` has another dtype.
      ValueError: As `quantize`; `hessian` has other channels, fewer rows than channels, or saw no
        finite batch; a damping below 0; or H is not positive definite, even so damped.

    Source: arXiv:2210.17323 (GPTQ), algorithm 1.

    Examples:
      >>> x = jax.random.normal(jax.random.key(0), (512, 32)) @ jnp.tri(32)
      >>> w = jax.random.normal(jax.random.key(1), (32, 8))
      >>> hessian = qt.scaling.Hessian.of(32).observe(x)
      >>> kernels = [qt.scaling.gptq(w, "int4_group32", hessian)]
      >>> kernels += [qt.quantize(w, qt.spec("int4_group32").along(0))]  # to nearest
      >>> print([f"{jnp.square(x @ (w - q.dequantize())).mean():.3f}" for q in kernels])
      ['0.306', '7.370']
    """
    w = lax.stop_gradient(check_differentiable(where, w, wide=False))
    check_number(where, "damping", damping)
    if not damping >= 0:
        raise ValueError(f"{where}: damping={damping}, expected 0 or more")
    contraction = Contraction.of(where, w.shape, axis)
    spec = contraction.along(formats.spec(spec), w.shape)
    check_holds(where, spec.element, w.dtype)
    scale_shape(where, spec, w.shape)
    check_inputs(where, w, hessian, contraction)
    # Experts and groups with fewer rows than channels are rounded to nearest, as zeros are.
    is_known = (hessian.rows >= hessian.channels)[..., None, None]
    total = jnp.where(is_known, hessian.total, 0) if hessian.rows.ndim else hessian.total
    total = total.reshape(-1, *total.shape[-2:])
    codes, scales, is_definite = _solve(
        w, total, np.float32(damping), spec, contraction, bool(act_order), bool(packed)
    )
    if not isinstance(is_definite, jax.core.Tracer) and not bool(is_definite):
        raise ValueError(
            f"{where}: H + {damping} * mean(diagonal) is not positive definite in "
            f"{total.dtype}, expected one that is; raise damping, or use Hessian.of(..., "
            "dtype='float64')"
        )
    packed_size = w.shape[-1] if packed else None
    lengths = spec.block_lengths(w.shape)
    return QArray(
        codes, scales.scale, spec, scales.tensor_scale, scales.zero_point, w.dtype, lengths,
        packed_size,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6))
def _solve(
    w: Array,
    total: Array,
    damping: Array,
    spec: BlockFormat,
    contraction: Contraction,
    act_order: bool,
    packed: bool,
) -> tuple[Array, Scales, Array]:
    blocks = contraction.blocks(spec, w.shape)
    _, groups, _ = blocks.counts
    scales, _ = find_scales(w, spec)
    is_fixed = groups == 1 or act_order or blocks.lengths[0] > 1 or spec.scale is None
    fixed = contraction.scales(scales, spec, w.shape) if is_fixed else Scales()
    matrices = contraction.matrices(exact_float32(w)).astype(total.dtype)
    batch = matrices.shape[0]
    fixed = fixed._replace(tensor_scale=None)
    fixed = jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, *x.shape[1:])), fixed)
    _, group, width = blocks.lengths
    problem = _Problem(spec, group, width, is_fixed, act_order)

    def solve(w: Array, total: Array, fixed: Scales) -> tuple[Array, Scales, Array]:
        return problem.solve(w, total, damping, fixed._replace(tensor_scale=scales.tensor_scale))

    codes, own, is_definite = jax.vmap(solve)(matrices, total, fixed)
    codes = contraction.restored(codes, w.shape)
    if not is_fixed:
        shape = spec.scale_shape(w.shape)
        scale, zero_point = (
            None if x is None else contraction.restored(x, shape) for x in own[::2]
        )
        scales = Scales(scale, scales.tensor_scale, zero_point)
    codes = pack(codes, spec.element) if packed and spec.element.bits in WIDTHS else codes
    return codes, scales, jnp.all(is_definite)


class _Problem(NamedTuple):
    """One matrix [channels, columns] to be rounded; static.

    Comments name the lines of algorithm 1 of arXiv:2210.17323. Its W has a row for each output: `w`
    is its transpose, `rows` are some of its channels, `upper` is the paper's Cholesky factor of
    H^-1, and `errors` is E of all channels so far.

    Attributes:
      group, width: The lengths of a block along channels and columns.
      is_fixed: Whether scales follow from the kernel as it is; else each group of channels gets
        its own when it is reached.
    """

    spec: BlockFormat
    group: int
    width: int
    is_fixed: bool
    act_order: bool

    def solve(
        self, w: Array, total: Array, damping: Array, fixed: Scales
    ) -> tuple[Array, Scales, Array]:
        """Codes, scales and whether the damped H is positive definite."""
        channels = w.shape[0]
        order = jnp.argsort(-jnp.diagonal(total)) if self.act_order else jnp.arange(channels)
        upper = _factor(total[order][:, order], damping)  # H^-1 <- Cholesky(H^-1)'
        step = min(_STEP, channels) if self.is_fixed else self.group
        missing = -channels % step
        ordered, upper = w[order], jnp.pad(upper, ((0, missing), (0, missing)))
        if missing:  # channels of zeros, which nothing depends on
            ordered = jnp.pad(ordered, ((0, missing), (0, 0)))
            upper += jnp.diag(jnp.where(jnp.arange(channels + missing) < channels, 0.0, 1.0))
        groups = jnp.pad(order // self.group, (0, missing))

        def block(errors: Array, start: Array) -> tuple[Array, tuple[Array, Scales]]:
            across = lax.dynamic_slice_in_dim(upper, start, step, 1)
            rows = lax.dynamic_slice_in_dim(ordered, start, step, 0)
            # W[:, i+B:] <- W[:, i+B:] - E H^-1[i:i+B, i+B:], put off until these channels come.
            rows -= jnp.matmul(across.T, errors, precision=lax.Precision.HIGHEST)
            scales = fixed
            if not self.is_fixed:  # from what the channels of this group have become
                blocks = with_block(self.spec, self.group, self.width)
                scales, _ = find_scales(in_float32(rows), blocks, fixed)
            places = lax.dynamic_slice_in_dim(groups, start, step) if self.is_fixed else None
            within = lax.dynamic_slice_in_dim(across, start, step, 0)
            rows, new = self._round_channels(rows, within, scales, places)
            return lax.dynamic_update_slice_in_dim(errors, new, start, 0), (rows, scales)

        starts = jnp.arange(0, channels + missing, step)
        _, (rows, scales) = lax.scan(block, jnp.zeros_like(ordered), starts)
        rows = rows.reshape(ordered.shape)[:channels]
        rows = jnp.zeros_like(w).at[order].set(rows)
        if self.is_fixed:
            scales = fixed
        else:
            scale, zero_point = (None if x is None else x[:, 0] for x in scales[::2])
            scales = Scales(scale, fixed.tensor_scale, zero_point)
        spec = with_block(self.spec, min(self.group, channels), self.width)
        codes = block_codes(in_float32(rows), spec, NEAREST, scales)
        return codes, scales, jnp.all(jnp.isfinite(upper))

    def _round_channels(
        self, rows: Array, upper: Array, scales: Scales, places: Array | None
    ) -> tuple[Array, Array]:
        """The channels of a block as they are when they are rounded, and their errors, scaled.

        Args:
          upper: Of the Cholesky factor, what lies between these channels.
          places: The group of each channel; None if the scales are those of this block alone.
        """
        spec = with_block(self.spec, 1, self.width)
        later = jnp.triu(upper, 1)

        def channel(i: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
            rows, errors = state
            place = 0 if places is None else places[i]
            scale, zero_point = (None if x is None else x[place][None] for x in scales[::2])
            own = Scales(scale, scales.tensor_scale, zero_point)
            # Q[:, j] <- quant(W[:, j]); E[:, j] <- (W[:, j] - Q[:, j]) / H^-1[j, j];
            # W[:, j:i+B] <- W[:, j:i+B] - E[:, j] H^-1[j, j:i+B]
            value = block_values(in_float32(rows[i][None]), spec, NEAREST, own)
            error = (rows[i] - value[0].astype(rows.dtype)) / upper[i, i]
            return rows - later[i][:, None] * error, errors.at[i].set(error)

        return lax.fori_loop(0, rows.shape[0], channel, (rows, jnp.zeros_like(rows)))


def _factor(total: Array, damping: Array) -> Array:
    """The upper Cholesky factor of the inverse of H, damped: U with U' U = inverse.

    With H = R R' for an upper R, U is the inverse of R: no inverse of H need be factored. Channels
    whose inputs were all zeros get 1 on the diagonal.
    """
    diagonal = jnp.diagonal(total)
    mean = jnp.mean(diagonal)
    mean = jnp.where(mean > 0, mean, 1)
    added = jnp.where(diagonal == 0, 1, damping.astype(total.dtype))
    damped = total / mean + jnp.diag(added)
    flipped = jnp.linalg.cholesky(damped[::-1, ::-1])
    upper = flipped[::-1, ::-1]
    return solve_triangular(upper, jnp.eye(len(upper), dtype=total.dtype), lower=False)
