"""Native FP8 on a GPU: is it right, does it run in FP8, and what does it gain?

Command: python experiments/benchmarks/gpu_training.py   (JAX with CUDA; nothing else on the GPU;
         at most eight minutes on an H100, autotuning included)
         python experiments/benchmarks/gpu_training.py --platform cpu --quick   (tries it out)
Claim: the conversion to FP8 by hardware gives the codes of the arithmetic on bit patterns for every
float32 number; native products equal the emulated ones within the rounding of their results; every
matmul of the native recipes multiplies in FP8, as the compiled program says. `native_fp8`, a matmul
with both gradients, is at least 1.3 times as fast as bfloat16 and as Flax's own FP8 operation at
the shapes of an MLP, `te_current` 1.2 times. A step of AdamW of two transformer blocks, d = 4,096,
on 8,192 tokens is timed, too.

Exit code 1: codes or results differ, or a matmul does not run in FP8.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from _results import Folder, Quick, Recorder, faster_by
from _timing import device_of, interleaved
from _training_models import (
    TRANSFORM,
    LinenStack,
    NnxStack,
    Running,
    Step,
    distance_to_one,
    in_dtype_of,
    linen_step,
    nnx_step,
)
from flax import nnx
from flax.linen import fp8_ops
from jax import lax

import qtoolkit as qt
from qtoolkit.casts.internal import native_codes
from qtoolkit.products import native_calls
from qtoolkit.products.internal import LayerRecipe, MatmulTrace, State, replacing_matmuls
from qtoolkit.scaling.internal import BUCKETS

PLAIN, PEER = "bfloat16", "flax Fp8DirectDotGeneralOp"
NUMBERS = (((1,), (0,)), ((), ()))
NATIVE = {
    name: dataclasses.replace(getattr(qt.recipes, name), arithmetic="native")
    for name in (
        *("native_fp8", "native_fp8_current", "te_current", "te_delayed_hybrid", "token_scaled"),
    )
}
RECIPES = {**NATIVE, "te_current, emulated": qt.recipes.te_current}
SHAPES = (8192, 4096, 4096), (8192, 4096, 14336), (8192, 16384, 4096)
CALLS = 10  # in a row for one timing, so that the host's part of a call does not count
PROMISES = {
    "native_fp8": [faster_by(1.3, PLAIN), faster_by(1.3, PEER)],
    "te_current": [faster_by(1.2, PLAIN)],
}


@partial(jax.jit, static_argnames=("fmt", "count"))
def differing_codes(first: jax.Array, fmt: qt.FloatFormat, count: int) -> jax.Array:
    """How many of `count` float32 numbers, by pattern from `first` on, two ways encode otherwise.

    They are clamped before, as casts of operands are. NaNs are left out; casts select them.
    """
    x = lax.bitcast_convert_type(lax.iota(np.uint32, count) + first, jnp.float32)
    largest = np.float32(float(fmt.max_finite))
    x = jnp.where(x == x, lax.clamp(-largest, x, largest), np.float32(0))
    return jnp.sum(native_codes(x, fmt) != qt.encode(x, fmt), dtype=jnp.uint32)


def count_conversions(recorder: Recorder, quick: bool) -> int:
    """Records and returns how many codes the conversion by hardware gets otherwise."""
    count = 2**20 if quick else 2**27
    total = 0
    for fmt in (qt.format("e4m3fn"), qt.format("e5m2")):
        firsts = range(0, 2**32, 2**32 // 16 if quick else count)
        differ = sum(int(differing_codes(np.uint32(first), fmt, count)) for first in firsts)
        title = "codes of float32 numbers by the GPU's own conversion, against bit patterns"
        recorder.count(title, fmt.name, count * len(firsts), differ)
        total += differ
    return total


def with_gradients(recipe: qt.Recipe | None) -> Callable[..., Any]:
    """y, dx, dw of a matmul, and the histograms of a recipe that has a history."""

    def call(x: jax.Array, w: jax.Array, ct: jax.Array, amax: jax.Array) -> Any:
        def product(x: jax.Array, w: jax.Array, probe: jax.Array) -> jax.Array:
            if recipe is None:
                return lax.dot_general(x, w, NUMBERS)
            state = State(amax, probe) if recipe.is_delayed else None
            trace = MatmulTrace(LayerRecipe(recipe).multiply(lambda _: state), {id(w): "kernel"})
            trace.know_parameter(w)
            with replacing_matmuls(trace):
                return lax.dot_general(x, w, NUMBERS)

        y, pull = jax.vjp(product, x, w, jnp.zeros((3, BUCKETS), jnp.float32))
        is_delayed = recipe is not None and recipe.is_delayed
        return y, *pull(ct)[: 2 + is_delayed]

    return call


def by_flax(x: jax.Array, w: jax.Array, ct: jax.Array, variables: Any) -> Any:
    def product(x: jax.Array, w: jax.Array, variables: Any) -> jax.Array:
        return fp8_ops.Fp8DirectDotGeneralOp().apply(variables, x, w, NUMBERS)

    y, pull = jax.vjp(product, x, w, variables)
    return y, *pull(ct)


def operands(m: int, k: int, n: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    x, w, ct = (
        jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) * scale
        for i, (shape, scale) in enumerate((((m, k), 1.0), ((k, n), 0.02), ((m, n), 1e-4)))
    )
    amax = jnp.stack([jnp.max(jnp.abs(a)).astype(jnp.float32) for a in (x, w, ct)])
    return x, w, ct, amax


def count_wrong_results(recorder: Recorder, size: int) -> int:
    """Native against emulated: four roundings to bfloat16, and the order of sums."""
    arrays, total = operands(size, size, size), 0
    for name, recipe in NATIVE.items():
        emulated = dataclasses.replace(recipe, arithmetic="emulate")
        got, expected = (jax.jit(with_gradients(r))(*arrays)[:3] for r in (recipe, emulated))
        sizes = jax.jit(with_gradients(emulated))(*(jnp.abs(a) for a in arrays))[:3]
        wrong = 0
        for mine, theirs, size_of in zip(got, expected, sizes, strict=True):
            mine, theirs, sums = (np.asarray(a, np.float64) for a in (mine, theirs, size_of))
            # FP8 tensor cores keep 14 bits of partial sums, whatever is added to them.
            bound = 4 * 2.0**-8 * np.abs(theirs) + 2.0**-12 * sums
            wrong += int(np.count_nonzero(~(np.abs(mine - theirs) <= bound)))
        title = "results of native products, against emulated ones"
        recorder.count(title, name, sum(a.size for a in got), wrong)
        total += wrong
    return total


def count_not_in_fp8(recorder: Recorder, name: str, shape: str, text: str) -> int:
    found = native_calls(text)
    missing = len(found.calls) - len(found.in_fp8)
    recorder.count("matmuls that do not run in FP8", f"{name}, {shape}", len(found.calls), missing)
    return missing


def time_matmuls(recorder: Recorder, m: int, k: int, n: int, runs: int) -> int:
    """Times one shape; returns how many matmuls of native recipes do not run in FP8."""
    x, w, ct, amax = operands(m, k, n)
    variables = fp8_ops.Fp8DirectDotGeneralOp().init(jax.random.key(0), x, w, NUMBERS)
    functions = {PLAIN: (with_gradients(None), amax), PEER: (by_flax, variables)}
    functions |= {name: (with_gradients(recipe), amax) for name, recipe in RECIPES.items()}
    shape, calls, missing = f"[{m:,}, {k:,}] x [{k:,}, {n:,}]", {}, 0
    for name, (function, last) in functions.items():
        compiled = jax.jit(function).lower(x, w, ct, last).compile()
        if name in NATIVE:
            missing += count_not_in_fp8(recorder, name, shape, compiled.as_text())
        calls[name] = partial(in_a_row, compiled, x, w, ct, last)
    seconds = {name: times / CALLS for name, times in interleaved(calls, runs=runs).items()}
    recorder.table(f"matmul with both gradients, {shape}", seconds, PLAIN, PROMISES)
    return missing


def in_a_row(call: Callable[..., Any], *arguments: Any) -> Any:
    for _ in range(CALLS - 1):
        call(*arguments)
    return call(*arguments)


def delayed_step(model: nnx.Module, x: jax.Array) -> Step:
    """A step that updates the model's histories."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    params = in_dtype_of(x, params)

    def step(params: Any, rest: Any, state: Any) -> Any:
        model = nnx.merge(graph, params, rest)
        value, grads = qt.nnx.value_and_grad(distance_to_one)(model, x)
        _, params, rest = nnx.split(model, nnx.Param, ...)
        updates, state = TRANSFORM.update(grads, state, params)
        return (optax.apply_updates(params, updates), rest, state), value

    return Step(step, (params, rest, TRANSFORM.init(params)))


def time_steps(recorder: Recorder, width: int, blocks: int, tokens: int, runs: int) -> None:
    length = min(tokens, 1024)
    x = jax.random.normal(jax.random.key(1), (tokens // length, length, width), jnp.bfloat16)
    model = NnxStack(width, width // 128, blocks, rngs=nnx.Rngs(0))
    steps = {PLAIN: nnx_step(model, distance_to_one, x)}
    for name in ("native_fp8", "native_fp8_current", "te_current, emulated"):
        wrapped = qt.nnx.wrap(nnx.clone(model), RECIPES[name])
        is_delayed = RECIPES[name].is_delayed
        steps[name] = (
            delayed_step(wrapped, x) if is_delayed else nnx_step(wrapped, distance_to_one, x)
        )
    peer = LinenStack(width, width // 128, blocks, fp8_ops.Fp8DirectDotGeneralOp)
    steps[PEER] = linen_step(peer, x)
    seconds = interleaved({name: Running(step) for name, step in steps.items()}, runs=runs)
    title = f"step of bfloat16, {blocks} blocks, d = {width:,}, {tokens:,} tokens"
    recorder.table(title, seconds, PLAIN)


def main(
    platform: Annotated[str, typer.Option(help='"gpu"; "cpu" to try the script out.')] = "gpu",
    quick: Quick = False,
    results: Folder = None,
) -> None:
    if (device := device_of(platform)) is None:
        return
    shapes = ((256, 128, 128),) if quick else SHAPES
    width, blocks, tokens = (128, 1, 128) if quick else (4096, 2, 8192)
    runs = 2 if quick else 10
    with Recorder("gpu_training", results, quick) as recorder, jax.default_device(device):
        recorder.origin["host"] += f", {device.device_kind}"
        wrong = count_conversions(recorder, quick)
        wrong += count_wrong_results(recorder, 128 if quick else 1024)
        missing = sum(time_matmuls(recorder, *shape, runs) for shape in shapes)
        time_steps(recorder, width, blocks, tokens, runs)
    if wrong or (missing and platform == "gpu"):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
