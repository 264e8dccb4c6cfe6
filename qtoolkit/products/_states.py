"""What a wrapped layer keeps for one matmul from step to step: a dictionary of arrays.

  history: float32[..., 3, steps], the largest magnitudes of lhs, rhs and the cotangent, the newest
    step first; 0 where there was none yet; for `Delayed` scaling.
  bad: uint32[...], the number of steps with an infinity or a NaN, which the history skips, and of
    steps in which an array was more than twice as large as everything in its history.
  probe: float32[..., 3, buckets], zeros whose gradient is a histogram of the largest magnitudes of
    lhs, rhs and the cotangent in this step. JAX adds up the gradients of a layer that runs several
    times. A sum of magnitudes would not tell the largest one, but a sum of histograms does.
  amax: float32[..., 3], the calibrated amaxes of lhs and rhs, then 0; for `Static` scaling.
  key: uint32[..., 2], an identity and a count of steps; for stochastic rounding.
  step: uint32[...], a count of steps; for a recipe with a warm-up.
  lhs_scale, lhs_offset, rhs_scale, rhs_offset: float32[...], parameters, NaN until `start_scales`;
    for `Learned` scaling.

Leading axes belong to stacks of layers, as `nnx.vmap` and `nn.scan` make them. In nnx these arrays
are Variables of the model, in linen they are two collections. All state of a model is one pytree:
such a dictionary for each matmul, by the path of its layer and its name.
"""

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qtoolkit.products._bilinear import Axes
from qtoolkit.products._learned import unstarted_error
from qtoolkit.products._matmul import Key, Planted
from qtoolkit.products._operand import Delayed, Learned, Operand, Static
from qtoolkit.products._plan import State
from qtoolkit.products._recipe import Recipe
from qtoolkit.products._rounded import rounding_of
from qtoolkit.scaling.internal import BAD_BUCKET, BUCKETS, updated_history

HISTORY, BAD, PROBE, AMAX, KEY, STEP = "history", "bad", "probe", "amax", "key", "step"
MOVING = (HISTORY, BAD, KEY, STEP)  # what each step changes
LEARNED = ("lhs_scale", "lhs_offset", "rhs_scale", "rhs_offset")
Array = jax.Array
Kept = Mapping[str, Any]


def started(recipe: Recipe, name: str, lead: tuple[int, ...] = ()) -> dict[str, Array]:
    """Histories and keys before the first step; `name` is mixed into keys."""
    state: dict[str, Array] = {}
    if recipe.is_delayed:
        state[HISTORY] = jnp.zeros((*lead, 3, recipe.history), jnp.float32)
        state[BAD] = jnp.zeros(lead, jnp.uint32)
    if recipe.is_stochastic:
        numbers = np.arange(int(np.prod(lead, dtype=int)), dtype=np.uint32).reshape(lead)
        identity = numbers + _identity(name)
        state[KEY] = jnp.stack([identity, jnp.zeros_like(identity)], axis=-1)
    if recipe.warm_up:
        state[STEP] = jnp.zeros(lead, jnp.uint32)
    return state


def uncalibrated(recipe: Recipe, lead: tuple[int, ...] = ()) -> dict[str, Array]:
    """Calibrated amaxes before `freeze` writes them: NaN."""
    if not recipe.is_calibrated:
        return {}
    unknown = [o is not None and o.is_calibrated for o in recipe.forward]
    with jax.debug_nans(False):  # no error: NaN says that an operand is not calibrated
        amax = jnp.where(jnp.array([*unknown, False]), jnp.float32(jnp.nan), 0)
        return {AMAX: jnp.broadcast_to(amax, (*lead, 3))}


def unstarted(recipe: Recipe, lead: tuple[int, ...] = ()) -> dict[str, Array]:
    """Learned scales and offsets before `start_scales`: NaN."""
    names = []
    for side, operand in zip(("lhs", "rhs"), recipe.forward, strict=True):
        scaling = None if operand is None else operand.scaling
        if isinstance(scaling, Learned):
            names += [f"{side}_scale"] + ([f"{side}_offset"] if scaling.offset else [])
    with jax.debug_nans(False):  # no error: NaN says that a scale is not started
        return {name: jnp.full(lead, jnp.nan, jnp.float32) for name in names}


def read_by(recipe: Recipe, kept: Kept) -> set[str]:
    """Which arrays of a state a matmul by a recipe reads."""
    is_other = HISTORY in kept and kept[HISTORY].shape[-1] != recipe.history
    first = started(recipe, "") | uncalibrated(recipe) | unstarted(recipe)
    return {n for n in first if n in kept and not (is_other and n in (HISTORY, BAD))}


def not_started(kept: Kept) -> str:
    """The first scale without a value, "" if all have one. Of those under `jit` nobody knows."""
    for name in (AMAX, *LEARNED):
        x = kept.get(name)
        is_known = x is not None and not isinstance(x, jax.core.Tracer) and x.is_fully_addressable
        if is_known and np.isnan(np.asarray(x)).any():
            return name
    return ""


def check_started(where: str, kept: Kept) -> None:
    """Raises if a scale has no value yet. Under `jit` NaN makes NaN."""
    name = not_started(kept)
    if name == AMAX:
        raise ValueError(
            f"{where}: the layer is not calibrated, though its recipe has Static() scaling; "
            "expected scales from a calibration: wrap the model with a recipe without Static(), "
            "and write qtoolkit.nnx.freeze(wrapped, qtoolkit.nnx.calibrate(wrapped, batches))"
        )
    if name:
        raise unstarted_error(where, name.split("_")[0])


def needs_state(recipe: Recipe) -> bool:
    """Whether matmuls have state that training changes: a history, key, count or learned scale."""
    is_updated = recipe.is_delayed or recipe.is_stochastic or recipe.warm_up > 0
    return is_updated or any(recipe.learned)


_HALF = (jnp.bfloat16, jnp.float16)


def as_float32(kept: Kept) -> dict[str, Any]:
    """The state after somebody has cast all floats of a model, to bfloat16 for instance."""
    return {name: x.astype(jnp.float32) if x.dtype in _HALF else x for name, x in kept.items()}


def lead_of(kept: Kept) -> int:
    """How many leading axes of its arrays belong to a stack of layers."""
    own_axes = {HISTORY: 2, PROBE: 2, KEY: 1, AMAX: 1}
    return min((x.ndim - own_axes.get(name, 0) for name, x in kept.items()), default=0)


def planted_with(states: Mapping[Key, Kept], zeros: Mapping[Key, Any]) -> dict[Key, Planted]:
    """What matmuls are given: their states, and zeros for what is measured, see `Program.run`."""
    given = {key: Planted(dict(x), zeros.get(key), lead_of(x)) for key, x in states.items()}
    return {key: Planted({}, x) for key, x in zeros.items()} | given


def probe_of(kept: Kept) -> Array:
    return jnp.zeros((*kept[HISTORY].shape[:-1], BUCKETS), jnp.float32)


def state_of(
    recipe: Recipe, name: str, kept: Kept | None, rng: Array | None = None
) -> State | None:
    """The state in the form that a matmul takes; None if there is nothing for it.

    If the state of a whole stack of layers arrives here, because a scan runs over something else,
    the matmul uses its largest magnitudes, the mean of its learned scales and the first key.

    Args:
      name: The name of layer and matmul, "mlp:kernel", for messages and keys.
      rng: uint32[2], words of a key of this step, in place of the key that is kept.
    """
    kept = kept or {}
    _check(recipe, name, kept)
    if not kept and rng is None:
        return None
    amax = probe = key = None
    if recipe.is_delayed:  # without a history by current scales
        amax = _largest(jnp.max(kept[HISTORY], axis=-1)) if HISTORY in kept else jnp.zeros(3)
        # Nobody differentiates by the zeros made here: scales are current ones, see `_product_jvp`.
        given = kept.get(PROBE, jnp.zeros((3, BUCKETS), jnp.float32))
        probe = jnp.sum(given.reshape(-1, 3, BUCKETS), axis=0)
    if recipe.is_calibrated and AMAX in kept:
        amax = _largest(kept[AMAX])
    if recipe.is_stochastic and rng is not None:
        key = rng ^ jnp.array([_identity(name), 0], jnp.uint32)
    elif recipe.is_stochastic and KEY in kept:
        key = kept[KEY].reshape(-1, 2)[0]
    step = jnp.max(kept[STEP]) if recipe.warm_up and STEP in kept else None
    return State(amax, probe, key, step=step, learned=_learned(kept))


def _largest(amax: Array) -> Array:
    return amax if amax.ndim == 1 else jnp.max(amax.reshape(-1, 3), axis=0)


def _learned(kept: Kept) -> Any:
    """((scale, offset) of lhs, (scale, offset) of rhs), None for what is not learned."""
    if not any(name in kept for name in LEARNED):
        return None
    # A scalar is returned as it is: under a trace `jnp.mean` would make it a tracer.
    values = (kept.get(name) for name in LEARNED)
    first, second, third, fourth = (x if x is None or not x.ndim else jnp.mean(x) for x in values)
    return (first, second), (third, fourth)


def _check(recipe: Recipe, name: str, kept: Kept) -> None:
    """Raises if what a checkpoint or a loop has put here cannot be the state of this recipe."""
    name = name.removeprefix(":") or "the model"
    steps = kept[HISTORY].shape[-1] if HISTORY in kept else recipe.history
    if recipe.is_delayed and steps != recipe.history:
        raise ValueError(
            f"{name}: a history of {steps} steps, expected {recipe.history}, as its recipe says: "
            "it is of a model wrapped by another recipe; wrap the model by that one, or start new "
            "histories: in nnx do not load any qtoolkit.nnx.ScalingState, in linen pass "
            'variables["qtoolkit"] = wrapped.init(key, x)["qtoolkit"]'
        )
    if HISTORY in kept and not recipe.is_delayed and AMAX not in kept:
        raise ValueError(
            f"{name}: the variables have a history of delayed scales, but the recipe of this "
            "module scales otherwise, expected variables of a module wrapped by the same recipe; "
            'wrap it by theirs, or pass variables without the collection "qtoolkit"'
        )
    for part in (BAD, KEY, STEP):
        dtype = kept[part].dtype if part in kept else np.uint32
        if dtype != np.uint32:
            raise ValueError(
                f"{name}: {part} of a matmul has dtype {dtype}, expected uint32: it was averaged "
                "with the statistics of batches; average only nnx.All(nnx.BatchStat, nnx.Not("
                "nnx.Any(qtoolkit.nnx.ScalingState, qtoolkit.nnx.Probe)))"
            )


def of_kernel(kept: Kept) -> tuple[Array | None, ...]:
    """(amax, key, learned scale, learned offset) of the kernel, for each layer of a stack."""
    amax = kept.get(AMAX)
    if amax is None and HISTORY in kept:
        amax = jnp.max(kept[HISTORY], axis=-1)
    return None if amax is None else amax[..., 1], kept.get(KEY), *map(kept.get, LEARNED[2:])


def fixed_scale(operand: Operand | None, amax: Array | None) -> Array | None:
    """The scale of an operand that does not follow from its array: static, calibrated, delayed.

    `amax` is that of calibration or of a history, None without one. Of formats with a second scale
    it is that of the tensor. None: there is no such scale, or the array is rotated first.
    """
    if operand is None or operand.transform is not None:
        return None
    scaling = operand.scaling
    is_static = isinstance(scaling, Static) and scaling.scale is not None
    if not is_static and (amax is None or not isinstance(scaling, Static | Delayed)):
        return None
    rounding = rounding_of(operand, Axes((), ()), (), ())
    scales = rounding.known_scales(jnp.zeros(()), amax)
    return scales.scale if scales.tensor_scale is None else scales.tensor_scale


def observe(kept: Kept, histograms: Array | None) -> dict[str, Any]:
    """The state with the magnitudes of a step in its histories.

    Args:
      histograms: The gradient of the probe; None if there is none.
    """
    if histograms is None:
        return dict(kept)
    history, bad = updated_history(kept[HISTORY], kept[BAD], _of_all_shards(histograms))
    return {**kept, HISTORY: history, BAD: bad}


def moved(kept: Kept, seen: Array, delayed: tuple[bool, bool, bool]) -> dict[str, Any]:
    """The state after a training step that nobody differentiates by probes.

    Args:
      seen: float32[..., 3, buckets], the sum of the histograms of all runs, see `observed`: zeros
        if it did not run. Leading axes are those of a stack; without them it saw it all.
      delayed: See `Recipe.delayed`.
    """
    seen = _of_all_shards(seen)
    new, ran = advance(kept), jnp.any(seen != 0, axis=(-2, -1))
    for name in (KEY, STEP):
        if name in kept:
            now = ran if ran.ndim <= kept[name].ndim else jnp.any(ran)
            now = now.reshape(now.shape + (1,) * (kept[name].ndim - now.ndim))
            new[name] = jnp.where(now, new[name], kept[name])
    if HISTORY in kept:
        lead = kept[HISTORY].shape[:-2]
        seen = seen.reshape(*ran.shape, *(1,) * (len(lead) - ran.ndim), *seen.shape[-2:])
        # An infinity in an operand that is not delayed counts, its magnitude does not.
        counts = np.array(delayed)[:, None] | (np.arange(BUCKETS) == BAD_BUCKET)
        seen = jnp.broadcast_to(seen * counts.astype(np.float32), (*lead, *seen.shape[-2:]))
        new[HISTORY], new[BAD] = updated_history(kept[HISTORY], kept[BAD], seen)
    return new


def _of_all_shards(histograms: Array) -> Array:
    """The sum over the shards of a mesh, which share one state, where JAX does not take it."""
    axes = untracked_axes()
    return lax.psum(histograms, axes) if axes else histograms


def untracked_axes() -> tuple[str, ...]:
    """The mesh axes on which arrays may differ without JAX knowing it.

    They are those of `jax.pmap` and of `jax.shard_map(check_vma=False)`. Where JAX does keep track,
    the type of `axis_index` says that it varies.
    """
    axes = jax.sharding.get_abstract_mesh().manual_axes
    varies = {axis: jax.typeof(lax.axis_index(axis)).manual_axis_type.varying for axis in axes}
    return tuple(axis for axis in axes if not varies[axis])


def advance(kept: Kept) -> dict[str, Any]:
    """The state with the key and the count of the next step."""
    new = dict(kept)
    if KEY in kept:
        new[KEY] = kept[KEY] + jnp.array([0, 1], jnp.uint32)
    if STEP in kept:  # it stays at the largest number
        new[STEP] = jnp.maximum(kept[STEP], kept[STEP] + np.uint32(1))
    return new


def taken_over(recipe: Recipe, kept: Kept, was_recipe: Recipe, was: Kept) -> dict[str, Any]:
    """`kept`, with what stays valid of the state `was` that the matmul had under another recipe.

    A history holds magnitudes of the arrays before rounding, so it is copied if it has the same
    number of steps. Calibrated and learned values are taken over only if the operand, with its
    format and transform, is the same. The count of steps in the key goes on, but the key's identity
    is that of the layer's new path.
    """
    new = dict(kept)
    if HISTORY in kept and HISTORY in was and kept[HISTORY].shape == was[HISTORY].shape:
        new[HISTORY], new[BAD] = jnp.copy(was[HISTORY]), jnp.copy(was[BAD])
    is_same = [one == other for one, other in zip(recipe.forward, was_recipe.forward, strict=True)]
    if AMAX in kept and AMAX in was:
        is_known = jnp.array([*is_same, False]) & jnp.isnan(kept[AMAX]) & (was[AMAX] > 0)
        with jax.debug_nans(False):
            new[AMAX] = jnp.where(is_known, was[AMAX], kept[AMAX])
    if KEY in kept and KEY in was:
        new[KEY] = kept[KEY].at[..., 1].set(was[KEY][..., 1])
    if STEP in kept and STEP in was:
        new[STEP] = jnp.copy(was[STEP])
    return new


def first_values(kept: Kept, found: Callable[[int], Any]) -> tuple[dict[str, Any], bool]:
    """New values for learned scales that have none, and whether one of them still has none.

    Args:
      found: Maps 0 (lhs) or 1 (rhs) to (scale, offset), or to None if it was not measured; see
        `first_scales`.
    """
    new, is_missing = {}, False
    for number, name in enumerate(LEARNED):
        before = kept.get(name)
        if before is None or not bool(jnp.any(jnp.isnan(before))):
            continue
        values = found(number // 2)
        value = np.float32(np.nan) if values is None else values[number % 2]
        is_missing |= bool(jnp.any(jnp.isnan(value)))
        new[name] = jnp.where(jnp.isnan(before), value, before)
    return new, is_missing


def _identity(name: str) -> np.uint32:
    return np.uint32(zlib.crc32(name.encode()))
