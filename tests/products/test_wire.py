"""Codes between devices, in place of numbers. Oracles: one device; XLA's text of the program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from refused import refused

import qtoolkit as qt
from qtoolkit.products._wire import sharded_axis

pytestmark = pytest.mark.devices(8)
X = jnp.float32(np.random.default_rng(0).normal(size=(1024, 64)))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(64, 256, rngs=rngs)
        self.down = nnx.Linear(256, 64, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(64)(linen.relu(linen.Dense(256)(x)))


def sharding_of(mesh, x):
    axis = sharded_axis(x.shape, 8) if x.ndim > 1 else None
    return NamedSharding(mesh, P(*("fsdp" if i == axis else None for i in range(x.ndim))))


def nnx_step(recipe):
    model = qt.nnx.wrap(Net(nnx.Rngs(0)), recipe)
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def step(params, rest, x):
        model = nnx.merge(graph, params, rest, copy=True)
        loss, grads = qt.nnx.value_and_grad(lambda m, x: jnp.mean(m(x) ** 2))(model, x)
        return loss, grads, nnx.state(model, qt.nnx.ScalingState)

    return step, params, rest


def linen_step(recipe):
    module = qt.linen.wrap(LinenNet(), recipe)
    variables = module.init(jax.random.key(0), X[:8])

    def step(params, rest, x):
        variables = {**rest, "params": params}
        loss = lambda variables, x: jnp.mean(module.apply(variables, x) ** 2)  # noqa: E731
        return qt.linen.value_and_grad(loss)(variables, x)

    return step, variables.pop("params"), variables


def run(made, is_sharded):
    """The results of a step, and what its program moves: bytes by (operation, dtype)."""
    step, params, rest = made
    if not is_sharded:
        return jax.jit(step)(params, rest, X), {}
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    places = jax.tree.map(lambda x: sharding_of(mesh, x), params)
    params = jax.device_put(params, places)
    x = jax.device_put(X, NamedSharding(mesh, P("fsdp")))
    with jax.set_mesh(mesh):
        jitted = jax.jit(step, out_shardings=(None, places, None))
        compiled = jitted.lower(params, rest, x).compile()
        out = compiled(params, rest, x)
    moved = qt.products.native_calls(compiled).transfers
    return out, {(one.op, one.dtype): one.bytes for one in moved}


def close(found, expected):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-6 * max(np.abs(y).max(), 1e-30))


KERNELS = 64 * 256  # forward of both, dgrad of the second


@pytest.mark.sample("nnx_step-te_current", "nnx_step-nvfp4", "linen_step-te_delayed_hybrid")
@pytest.mark.parametrize(
    ("make", "name"),
    [(nnx_step, name) for name in ("te_current", "te_delayed_hybrid", "mxfp8", "nvfp4")]
    + [(linen_step, "te_delayed_hybrid")],
)
def test_sharded_kernels_are_gathered_as_codes(make, name):
    recipe = getattr(qt.recipes, name)
    expected, _ = run(make(recipe), is_sharded=False)
    plain, moved = run(make(recipe), is_sharded=True)
    assert moved["all-gather", "f32"] == 3 * KERNELS * 4
    found, moved = run(make(qt.policies.gather_codes(recipe, "fsdp")), is_sharded=True)
    assert moved["all-gather", "u8"] >= 3 * KERNELS
    # XLA for CPUs moves 8-bit scales of blocks in other dtypes.
    scales = KERNELS // 16 if name == "nvfp4" else KERNELS // 32 if name == "mxfp8" else 0
    gathered = sum(n for (op, dtype), n in moved.items() if op == "all-gather" and dtype != "u8")
    assert gathered <= 3 * scales * 4
    if name != "nvfp4":  # whose random bits differ
        close(plain, expected)
    close(found, expected)


def test_delayed_scales_gather_codes_by_their_history():
    """The second step is scaled by the first one's magnitudes, on every device alike."""
    recipe = qt.recipes.te_delayed_hybrid
    step, params, rest = nnx_step(recipe)
    (_, _, state), _ = run((step, params, rest), is_sharded=False)
    nnx.update(rest, state)
    expected, _ = run((step, params, rest), is_sharded=False)
    found, moved = run(
        (nnx_step(qt.policies.gather_codes(recipe, "fsdp"))[0], params, rest), is_sharded=True
    )
    close(found, expected)
    assert moved["all-gather", "u8"] == 3 * KERNELS


def test_codes_are_gathered_inside_of_a_shard_map_over_another_axis():
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    w = jnp.float32(np.random.default_rng(1).normal(size=(256, 64)))
    x = X.reshape(256, 256)

    def gradients(x, w, recipe):
        product = lambda x, w: qt.einsum("ni,io->no", x, w, recipe=recipe)  # noqa: E731
        return jax.grad(lambda x, w: jnp.sum(jnp.sin(product(x, w))), (0, 1))(x, w)

    def of_shards(x, w):
        dx, dw = gradients(x, w, qt.policies.gather_codes(qt.recipes.mxfp8, "fsdp", 0))
        return dx, jax.lax.psum(dw, "data")

    pairs = [gradients(part, w, qt.recipes.mxfp8) for part in jnp.split(x, 2)]
    with jax.set_mesh(mesh):
        specs = {"in_specs": (P("data"), P()), "out_specs": (P("data"), P())}
        step = jax.shard_map(of_shards, axis_names={"data"}, check_vma=False, **specs)
        arrays = jax.device_put((x, w), (P("data"), P("fsdp")))
        compiled = jax.jit(step).lower(*arrays).compile()
        found = compiled(*arrays)
    close(found, (jnp.concatenate([dx for dx, _ in pairs]), sum(dw for _, dw in pairs)))
    moved = {(t.op, t.dtype): t.bytes for t in qt.products.native_calls(compiled).transfers}
    assert moved["all-gather", "u8"] == 2 * w.size  # forward, dgrad
    assert moved.get(("all-gather", "f32"), 0) <= 2 * w.size // 32 * 4  # their scales


def test_without_a_mesh_a_warning_says_so():
    step, params, rest = nnx_step(qt.policies.gather_codes(qt.recipes.te_current, "fsdp"))
    with pytest.warns(RuntimeWarning, match="jax.set_mesh"):
        jax.jit(step)(params, rest, X)


@pytest.mark.parametrize(
    ("name", "axis"),
    # 100 columns are no whole number for each of 8 devices, and 64 rows only two blocks of 32.
    [("te_current", 1), ("mxfp8", 0)],
)
def test_shards_of_no_whole_block_warn(name, axis):
    """Without the warning float32 would move, unnoticed."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    recipe = qt.policies.gather_codes(getattr(qt.recipes, name), "fsdp", axis)
    w = jnp.ones((64, 100 if axis else 256))
    with jax.set_mesh(mesh), pytest.warns(RuntimeWarning, match="whole blocks"):
        jax.jit(lambda x, w: qt.einsum("ni,io->no", x, w, recipe=recipe)).lower(X, w)


def test_an_axis_that_a_kernel_lacks_is_refused():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    recipe = qt.policies.gather_codes(qt.recipes.te_current, "fsdp", 2)
    with jax.set_mesh(mesh), refused(ValueError, "gather_axis=2"):
        qt.einsum("ni,io->no", X, jnp.ones((64, 256)), recipe=recipe)


def test_an_explicit_mesh_says_where_the_shards_lie():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Explicit,))
    recipe = qt.recipes.te_current
    w = jnp.float32(np.random.default_rng(1).normal(size=(64, 256)))

    def product(x, w, recipe):
        return qt.einsum("ni,io->no", x, w, recipe=recipe)

    expected = jax.jit(product, static_argnums=2)(X, w, recipe)
    with jax.set_mesh(mesh):
        x, shards = jax.device_put(X, P("fsdp")), jax.device_put(w, P("fsdp"))
        compiled = jax.jit(product, static_argnums=2).lower(
            x, shards, qt.policies.gather_codes(recipe, "fsdp")
        )
        compiled = compiled.compile()
        found = compiled(x, shards)
    moved = {(t.op, t.dtype): t.bytes for t in qt.products.native_calls(compiled).transfers}
    assert moved["all-gather", "u8"] == KERNELS
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


class Stack(nnx.Module):
    """Three residual blocks, in a scan with remat."""

    def __init__(self, rngs):
        self.layers = nnx.vmap(Net)(rngs.split(3))

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def run(x, layer):
            return x + layer(x)

        return run(x, self.layers)


def test_a_scan_over_layers_on_a_mesh_with_tensor_parallel_kernels():
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    recipe = qt.recipes.te_delayed_hybrid
    rules = {f"layers/{name}": qt.policies.gather_codes(recipe, "fsdp", axis)
             for axis, name in enumerate(("up", "down"))}  # fmt: skip

    def place(x):
        names = (None, "fsdp", "tp") if x.shape[1:] == (64, 256) else (None, "tp", "fsdp")
        return NamedSharding(mesh, P(*names) if x.ndim == 3 else P())

    def stepping(recipe):
        graph, *state = nnx.split(qt.nnx.wrap(Stack(nnx.Rngs(0)), recipe), nnx.Param, ...)

        def step(params, rest, x):
            model = nnx.merge(graph, params, rest, copy=True)
            return qt.nnx.value_and_grad(lambda m, x: jnp.mean(m(x) ** 2))(model, x)

        return jax.jit(step), state

    step, (params, rest) = stepping(recipe)
    expected = step(params, rest, X)
    step, (params, rest) = stepping(qt.Rules(rules))
    params = jax.device_put(params, jax.tree.map(place, params))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("fsdp")))
        compiled = step.lower(params, rest, x).compile()
        found = compiled(params, rest, x)
    close(found, expected)
    moved = {(t.op, t.dtype): t.bytes for t in qt.products.native_calls(compiled).transfers}
    assert moved["all-gather", "u8"] >= 3 * 5 * KERNELS // 2  # forward twice, by remat, and dgrad
    assert moved.get(("all-gather", "f32"), 0) < KERNELS


def test_gather_needs_codes():
    refused(ValueError, "at most 8 bits", qt.Operand, "bfloat16", gather="fsdp")
    recipe = qt.policies.gather_codes(qt.recipes.te_current, "fsdp")
    assert qt.recipes.from_json(qt.recipes.to_json(recipe)) == recipe
    assert "codes gathered over fsdp" in repr(recipe)


def experts(x, w, send):
    """Each device has an expert; tokens [expert, token, feature] go there and come back."""
    sent = send(x)
    y = jnp.einsum("etf,fg->etg", sent, w[0])
    return jax.lax.all_to_all(y, "experts", 1, 0, tiled=True)


@pytest.mark.parametrize("spec", ["mxfp8_e4m3", qt.BlockFormat.token("e4m3fn")])
@pytest.mark.parametrize("gradient", [None, "mxfp8_e5m2"])
def test_tokens_of_experts_move_as_codes(spec, gradient):
    mesh = jax.make_mesh((8,), ("experts",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(0)
    x, w = (jnp.float32(rng.normal(size=shape)) for shape in ((64, 4, 64), (8, 64, 64)))

    def by_codes(x):
        return qt.products.all_to_all(x, "experts", 0, 1, spec, gradient)

    def step(x, w, send=by_codes):
        specs = {"in_specs": (P("experts"), P("experts")), "out_specs": P("experts")}
        run = jax.shard_map(lambda x, w: experts(x, w, send), mesh=mesh, **specs)
        return jnp.sum(run(x, w) ** 2), run(x, w)

    def one_device(x, w):
        """Token t of device d goes to expert e: x[8 * d + e, t]."""
        x = x + jax.lax.stop_gradient(qt.fake_quantize(x, spec) - x)
        y = jnp.einsum("detf,efg->detg", x.reshape(8, 8, 4, 64), w)
        return jnp.sum(y**2), y.reshape(64, 4, 64)

    graded = jax.jit(jax.value_and_grad(step, argnums=(0, 1), has_aux=True))
    (_, out), grads = graded(x, w)
    (_, expected), wanted = jax.value_and_grad(one_device, argnums=(0, 1), has_aux=True)(x, w)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(grads[1], wanted[1], rtol=1e-4, atol=1e-3)
    if gradient is None:
        np.testing.assert_allclose(grads[0], wanted[0], rtol=1e-4, atol=1e-3)
    else:
        rounded = qt.fake_quantize(wanted[0], gradient)
        assert float(jnp.mean(jnp.abs(grads[0] - rounded) < 1e-4 * jnp.abs(rounded) + 1e-6)) > 0.99
    moved = qt.products.native_calls(jax.jit(step).lower(x, w).compile()).transfers
    codes = [t for t in moved if (t.op, t.dtype) == ("all-to-all", "u8")]
    assert codes


def test_blocks_are_not_torn_apart():
    mesh = jax.make_mesh((8,), ("experts",), axis_types=(AxisType.Auto,))
    x = jnp.ones((64, 8, 64))
    for axes, spec in (((0, 2), "mxfp8_e4m3"), ((0, 1), "e4m3fn"), ((0, 1), "nvfp4")):

        def send(x, axes=axes, spec=spec):
            return qt.products.all_to_all(x, "experts", *axes, spec)

        with refused(ValueError, "scales belong to one token"):
            jax.shard_map(send, mesh=mesh, in_specs=P("experts"), out_specs=P("experts"))(x)
