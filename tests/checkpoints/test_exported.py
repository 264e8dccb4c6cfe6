"""`export`. Oracle: the files that `convert` writes of the saved model, byte for byte."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from stored import stored

import qtoolkit as qt
from qtoolkit.checkpoints import CheckpointError, convert, export, load, save
from qtoolkit.formats import Rules

CONFIG = {"model_type": "llama", "hidden_size": 256}
SHAPES = {f"model.layers.0.self_attn.{x}_proj.weight": (128, 256) for x in "qkv"}
SHAPES |= {"model.layers.0.self_attn.o_proj.weight": (256, 128), "model.norm.weight": (256,)}
SHAPES |= {f"model.layers.0.mlp.{x}_proj.weight": (384, 256) for x in ("gate", "up")}
SHAPES |= {"model.layers.0.mlp.down_proj.weight": (256, 384), "lm_head.weight": (64, 256)}
Q = "model.layers.0.self_attn.q_proj.weight"
CASES = [
    ({"layout": "compressed-tensors", "format": "e4m3fn", "scaling": "channel"}),
    ({"layout": "compressed-tensors", "format": "e4m3fn", "scaling": "tensor"}),
    ({"layout": "compressed-tensors", "scaling": "tensor", "input_scales": 0.5}),
    ({"layout": "compressed-tensors", "format": "mxfp8_e4m3"}),
    ({"layout": "compressed-tensors", "format": "mxfp4"}),
    ({"layout": "compressed-tensors", "format": "nvfp4"}),
    ({"layout": "compressed-tensors", "format": "int4_group32"}),
    ({"layout": "compressed-tensors", "format": "int8_group128"}),
    ({"layout": "compressed-tensors", "format": Rules({"mlp": "mxfp4", "[qkv]_proj": "int8"})}),
    ({"layout": "finegrained-fp8", "format": "e4m3fn"}),
    ({"layout": "finegrained-fp8", "format": "deepseek_128x128"}),
    ({"layout": "modelopt", "format": "nvfp4", "input_scales": 0.37}),
    ({"layout": "compressed-tensors", "format": "W4A16_ASYM"}),
    ({"layout": "compressed-tensors", "format": Rules({"mlp": "W8A8_ASYM"})}),
    ({"layout": "plain", "format": "e5m2", "scaling": "block"}),
    ({"layout": "plain", "format": "bfloat16"}),
]


def model(dtype=ml_dtypes.bfloat16):
    rng = np.random.default_rng(0)
    weights = {n: rng.normal(size=s).astype(np.float32) for n, s in SHAPES.items()}
    weights[Q] *= 8  # its amax is that of q, k and v together
    weights[Q][0], weights[Q][1, :40] = 0, 1e-30
    return {name: x.astype(dtype) for name, x in weights.items()}


def written(path, weights, config=CONFIG, **options):
    (path / "src").mkdir(parents=True)
    (path / "src" / "config.json").write_text(json.dumps(config))
    save(path / "src" / "model.safetensors", weights)
    report = convert(path / "src", path / "dst", **options)
    return stored(path / "dst"), report


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        got = np.asarray(found[name])
        assert (got.dtype, got.shape) == (array.dtype, array.shape), name
        assert got.tobytes() == np.ascontiguousarray(array).tobytes(), name


@pytest.mark.sample("2", "5", "6", "9")
@pytest.mark.parametrize("case", range(len(CASES)))
def test_the_bytes_are_those_of_convert(tmp_path, case):
    options, weights = CASES[case], model()
    expected, report = written(tmp_path, weights, **options)
    exported = export(jax.tree.map(jnp.asarray, weights), CONFIG, **options)
    assert_same(dict(exported), expected)
    assert exported.plan.quantization_config == report.quantization_config


@pytest.fixture
def compilations():
    """The programs that are compiled from here on, one for each entry."""
    found = []

    def listen(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("fmt", ["nvfp4", "int4_group32", "e4m3fn"])
def test_a_second_export_of_the_same_shapes_compiles_nothing(compilations, fmt):
    """Of kernels, of which the checkpoint has the transpose, and of a stack of experts."""

    def exported(seed):
        draw = np.random.default_rng(seed).normal
        shapes = {"q": (160, 96), "k": (160, 96), "up": (3, 96, 160)}  # no other test has these
        tree = {name: jnp.float32(draw(size=shape)) for name, shape in shapes.items()}
        table = {name: (f"model.layers.0.self_attn.{name}_proj.weight", (1, 0)) for name in "qk"}
        table["up"] = (f"{EXPERTS}.{{expert}}.up_proj.weight", (1, 0))
        del compilations[:]
        found = dict(export(tree, CONFIG, format=fmt, names=table))
        return jax.block_until_ready(found)

    exported(0)
    assert compilations
    exported(1)
    assert compilations == []


def test_sharded_in_another_order_and_a_part(tmp_path):
    """As a model of Flax has it: kernels are [inputs, outputs]."""
    weights = model(np.float32)
    expected, _ = written(tmp_path, weights, format="nvfp4")
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    tree, table = {}, {}
    for name, x in weights.items():
        kernel = x.T.reshape(256, 4, 32) if name == Q else x.T
        spec = PartitionSpec("x") if x.ndim > 1 else PartitionSpec()
        tree[name.replace("weight", "kernel")] = jax.device_put(kernel, NamedSharding(mesh, spec))
        order = (0,) if x.ndim == 1 else (1, 0)
        place = (name, order, x.shape) if name == Q else (name, order)
        table[name.replace("weight", "kernel")] = place
    found = dict(export(tree, CONFIG, format="nvfp4", names=table))
    assert_same(found, expected)
    codes = f"{Q.removesuffix('weight')}weight_packed"
    assert len(found[codes].sharding.device_set) == 4
    part = dict(export(tree, CONFIG, format="nvfp4", names=table, only=["k_proj"]))
    assert_same(dict(export(tree, CONFIG, format="nvfp4", names=table.get)), expected)
    # The tensor scale is that of q, k and v together.
    assert_same(part, {name: x for name, x in expected.items() if "k_proj" in name})
    save(tmp_path / "back.safetensors", {n: np.asarray(x) for n, x in found.items()})
    like = {name: jax.ShapeDtypeStruct(x.shape, jnp.float32) for name, x in tree.items()}
    loaded = load(tmp_path / "dst", like, dtype="float32", names=table)
    np.testing.assert_array_equal(loaded["lm_head.kernel"], np.asarray(weights["lm_head.weight"]).T)


def test_scales_of_a_served_model_are_sent(tmp_path):
    """Those that training used: of a history of 3 steps in which weights were larger."""
    wrapped = qt.nnx.wrap(nnx.Linear(64, 32, rngs=nnx.Rngs(0)), qt.recipes.te_delayed_hybrid)
    loss = qt.nnx.value_and_grad(lambda model, x: (model(x) ** 2).sum())
    for factor in (3.0, 1.0):
        loss(wrapped, factor * jnp.ones((2, 64)))
    largest = np.abs(wrapped.kernel.get_value()).max()
    wrapped.kernel.set_value(wrapped.kernel.get_value() / 4)
    served = qt.nnx.quantize(wrapped)
    kernel = served.kernel.get_value()
    names = {"kernel": ("up.weight", (1, 0)), "bias": "up.bias"}
    options = {"layout": "compressed-tensors", "scaling": "tensor", "names": names}
    options["input_scales"] = qt.nnx.input_scales(wrapped)
    found = dict(export(nnx.state(served, nnx.Param), **options))
    assert found["up.weight"].tobytes() == np.asarray(kernel.codes).T.tobytes()
    np.testing.assert_array_equal(found["up.weight_scale"], np.asarray(kernel.scale).reshape(1))
    # A history holds the bounds of an eighth of an octave or less.
    for name, amax in (("up.weight_scale", largest), ("up.input_scale", 3)):
        assert amax / 448 <= float(found[name][0]) <= 1.125 * amax / 448
    values = load_values(tmp_path, found)
    np.testing.assert_array_equal(values, np.asarray(kernel.dequantize()).T)
    del options["input_scales"]
    with pytest.raises(CheckpointError, match=r"up\.weight: e4m3fn by .*, expected e4m3fn by chan"):
        dict(export(nnx.state(served, nnx.Param), **options | {"scaling": "channel"}))


def load_values(tmp_path, entries):
    save(tmp_path / "sent.safetensors", {name: np.asarray(x) for name, x in entries.items()})
    return load(tmp_path / "sent.safetensors", dtype="float32")["up.weight"]


def test_calibrated_scales_are_input_scales():
    model = nnx.Sequential(nnx.Linear(64, 32, rngs=nnx.Rngs(0)))
    wrapped = qt.nnx.wrap(model, qt.recipes.te_current)
    assert qt.nnx.input_scales(wrapped) == {}
    frozen = qt.nnx.freeze(wrapped, qt.nnx.calibrate(wrapped, [7 * jnp.ones((2, 64))]))
    assert qt.nnx.input_scales(frozen) == {"layers.0.kernel": np.float32(7) / np.float32(448)}


def test_input_scales_of_linen():
    """Oracle: the amaxes that went in, over 448"""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(4, kernel_init=nn.initializers.ones, name="up")(x)
            return nn.Dense(2, name="down")(-x)

    x = jnp.full((2, 64), 3.0)
    for recipe in (qt.recipes.te_current, qt.recipes.te_delayed_hybrid):
        module = qt.linen.wrap(Net(), recipe)
        variables = module.init(jax.random.key(0), x)
        assert qt.linen.input_scales(module, variables, x) == {}  # nothing is known yet
        if recipe.is_delayed:
            loss = qt.linen.value_and_grad(lambda v, x, m=module: (m.apply(v, x) ** 2).sum())
            variables = {**variables, "qtoolkit": loss(variables, x)[2]}
        else:
            found = qt.linen.calibrate(module, variables, [x])
            module, variables = qt.linen.freeze(module, variables, found)
        scales = qt.linen.input_scales(module, variables, x)
        assert scales.keys() == {"up.kernel", "down.kernel"}
        for name, amax in (("up", 3), ("down", 192)):  # a history holds bounds
            most = 1.125 if recipe.is_delayed else 1.0001
            assert amax / 448 * 0.9999 <= scales[f"{name}.kernel"] <= most * amax / 448


def test_what_cannot_be_sent():
    weights = {"a.weight": jnp.ones((128, 128)), "b.weight": jnp.ones((128, 128))}
    with pytest.raises(CheckpointError, match=r"export: a\.weight: two arrays have this name"):
        export(weights, names=lambda name: "a.weight")
    with pytest.raises(CheckpointError, match=r"axes \(0, 2\) and shape"):
        export(weights, names={"a.weight": ("a.weight", (0, 2), (128, 128))})
    with pytest.raises(CheckpointError, match=r"export: key has key<fry>"):
        export({"key": jax.random.key(0)})
    with pytest.raises(CheckpointError, match=r"matches nothing, expected a part of a name"):
        export(weights, only="c")
    names = [name for name, _ in export(weights, layout="plain", only="b.weight")]
    assert names
    assert all(name.startswith("b") for name in names)
    with pytest.raises(CheckpointError, match=r"cannot hold nvfp4"):
        export(weights, layout="finegrained-fp8", format="nvfp4")


EXPERTS = "model.layers.0.mlp.experts"


@pytest.mark.parametrize("layout", ["compressed-tensors", "finegrained-fp8", "modelopt", "plain"])
@pytest.mark.parametrize("kind", ["qwen3_5_moe", "llama4"])
def test_stacks_of_experts_are_split_as_the_layout_has_them(tmp_path, kind, layout):
    """Of Llama 4 [experts, inputs, outputs], of Qwen [experts, outputs, inputs]."""
    if kind == "llama4" and layout not in ("compressed-tensors", "plain"):
        return
    shapes = {"gate_up_proj": (3, 256, 128), "down_proj": (3, 128, 128)}
    if kind == "llama4":
        shapes = {name: (e, i, o) for name, (e, o, i) in shapes.items()}
    rng, config = np.random.default_rng(0), {"model_type": kind, "hidden_size": 128}
    weights = {f"{EXPERTS}.{n}": np.float32(rng.normal(size=s)) for n, s in shapes.items()}
    weights[f"{EXPERTS}.gate_up_proj"][1] *= 9  # each expert has its own tensor scale
    options = {
        "layout": layout,
        "format": {"finegrained-fp8": "e4m3fn", "plain": "int8"}.get(layout, "nvfp4"),
    }
    options |= {"input_scales": 0.5} if layout == "modelopt" else {}
    expected, _ = written(tmp_path, weights, config, **options)
    assert_same(dict(export(jax.tree.map(jnp.asarray, weights), config, **options)), expected)
    assert any(".2." in name for name in expected) == (layout != "plain")


def test_a_stack_has_the_names_of_its_experts(tmp_path):
    """As Mixtral's or Qwen3's checkpoints have them; in the tree they are [experts, in, out]."""
    rng, config = np.random.default_rng(0), {"model_type": "qwen3_moe", "hidden_size": 64}
    tree, weights, table = {}, {}, {}
    for part, shape in {"up": (64, 128), "gate": (64, 128), "down": (128, 64)}.items():
        tree[part] = jnp.float32(rng.normal(size=(3, *shape)))
        target = f"{EXPERTS}.{{expert}}.{part}_proj.weight"
        table[part] = (target, (1, 0))
        weights |= {target.format(expert=e): np.asarray(x.T) for e, x in enumerate(tree[part])}
    expected, _ = written(tmp_path, weights, config, format="nvfp4")
    found = dict(export(tree, config, format="nvfp4", names=table))
    assert_same(found, expected)
    part = dict(export(tree, config, format="nvfp4", names=table, only=[r"\.1\.up"]))
    assert_same(part, {name: x for name, x in expected.items() if ".1.up" in name})
    stored = {name: qt.quantize(x, qt.spec("int4_group32").along(1)) for name, x in tree.items()}
    found = dict(export(stored, config, format="int4_group32", names=table))
    scales = np.asarray(stored["up"].scale)[1].T  # those of the model, not new ones
    np.testing.assert_array_equal(found[f"{EXPERTS}.1.up_proj.weight_scale"], scales)
