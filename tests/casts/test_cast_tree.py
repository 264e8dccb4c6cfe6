"""cast_tree: which leaves become what. Oracles: ml_dtypes, and `cast` of each leaf by itself."""

import gc
import warnings
import weakref
import zlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from qtoolkit.casts import Stochastic, _tree, cast, cast_tree
from qtoolkit.formats import Rules

KEY = jax.random.key(7)


def normal(shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def tree():
    return {
        "layers": [
            {"kernel": jnp.asarray(normal((4, 3))), "bias": normal(3, np.float16)},
            {"kernel": jnp.asarray(normal((3, 2), "bfloat16")), "bias": normal((), np.float32)},
        ],
        "step": np.int32(5),
        "mask": jnp.array([True, False]),
        "empty": jnp.zeros((0, 3)),
        "key": jax.random.key(0),
        "raw": np.arange(2, dtype=np.uint32),
        "wave": jnp.ones(2, jnp.complex64),
        "name": "text",
        "none": None,
        "number": 3,
        "tuple": (jnp.float32(0.1), ()),
    }


FLOATS = {
    "layers/0/kernel",
    "layers/0/bias",
    "layers/1/kernel",
    "layers/1/bias",
    "empty",
    "tuple/0",
}


def flat(tree):
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(k, simple=True, separator="/"): leaf for k, leaf in pairs}


def assert_identical(got, expected, name=""):
    got, expected = np.asarray(got), np.asarray(expected)
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), name
    assert got.tobytes() == expected.tobytes(), name


@pytest.mark.quick
def test_float_leaves_become_what_ml_dtypes_makes_of_them():
    before = tree()
    after = cast_tree(before, "e4m3fn")
    assert jax.tree.structure(after) == jax.tree.structure(before)
    old, new = flat(before), flat(after)
    for name, leaf in old.items():
        if name in FLOATS:  # all are far below 448: ml_dtypes need not saturate
            assert isinstance(new[name], jax.Array)
            expected = np.asarray(leaf).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
            assert_identical(new[name], expected, name)
        else:
            assert new[name] is leaf, name


@pytest.mark.sample("e5m2-toward_zero", "int8-to_odd")
@pytest.mark.parametrize(
    "options",
    [
        {"rounding": "toward_zero", "saturation": "none"},
        {"rounding": "to_odd", "saturation": "propagate"},
        {"rounding": "stochastic", "key": KEY},
        {"rounding": Stochastic("B", bits=5), "key": jax.random.PRNGKey(3)},
    ],
    ids=["toward_zero", "to_odd", "stochastic", "B5"],
)
@pytest.mark.parametrize("fmt", ["e5m2", "int8"])
def test_every_leaf_is_as_if_it_were_cast_alone(fmt, options):
    x = np.array([np.inf, -1e6, 0.3, np.nan, 449, -0.0, 1e-8], np.float32)
    with np.errstate(over="ignore"):
        half = x.astype(np.float16)
    before = {"a": {"b": jnp.asarray(x), "c": [x, half]}, "z": jnp.asarray(x)}
    after = flat(cast_tree(before, fmt, **options))
    for name, leaf in flat(before).items():
        own = dict(options)
        if "key" in own:
            own["key"] = jax.random.fold_in(own["key"], zlib.crc32(name.encode()))
        assert_identical(after[name], cast(leaf, fmt, **own), name)


def test_random_bits_of_a_leaf_depend_on_its_path_alone():
    x = jnp.asarray(normal(500))
    options = {"fmt": "e4m3fn", "rounding": "stochastic", "key": KEY}
    small = flat(cast_tree({"a": x, "b": x}, **options))
    large = flat(cast_tree({"0": x, "a": x, "b": x, "c": [x, jnp.arange(3)]}, **options))
    ruled = flat(cast_tree({"a": x, "b": x}, **{**options, "fmt": Rules({"^b": "e4m3fn"})}))
    for other in (large, ruled):
        assert_identical(other["b"], small["b"])
    assert len({large[name].tobytes() for name in ("0", "a", "b", "c/0")}) == 4
    traced = jax.jit(lambda t, key: cast_tree(t, **{**options, "key": key}))({"a": x}, KEY)
    assert_identical(traced["a"], small["a"])
    stacked = jax.vmap(lambda key: cast_tree({"a": x}, **{**options, "key": key}))(
        jnp.stack([KEY, jax.random.key(1)])
    )
    assert_identical(stacked["a"][0], small["a"])


def test_rules_choose_a_format_for_each_leaf():
    before = tree()
    rules = Rules(
        {
            r"layers/\d/bias": None,
            "^layers/1": "bfloat16",
            np.bool_: "int8",
            "^(step|number)$": "float16",
            ml_dtypes.bfloat16: "e5m2",
            "name": None,
        },
        default="e4m3fn",
    )
    after = cast_tree(before, rules)
    old, new = flat(before), flat(after)
    formats = {
        "layers/0/kernel": "e4m3fn",
        "layers/1/kernel": "bfloat16",
        "mask": "int8",
        "step": "float16",
        "number": "float16",
        "empty": "e4m3fn",
        "tuple/0": "e4m3fn",
    }
    for name, leaf in old.items():
        if name in formats:
            assert_identical(new[name], cast(leaf, formats[name]), name)
        else:
            assert new[name] is leaf, name


def test_without_a_default_what_no_rule_matches_stays():
    before = {"a": jnp.ones(3), "b": jnp.ones(3), "c": np.float64(1)}
    after = cast_tree(before, Rules({"^a$": "e5m2", np.float64: "bfloat16"}))
    assert after["b"] is before["b"]
    assert (after["a"].dtype, after["c"].dtype) == (jnp.float8_e5m2, jnp.bfloat16)


def test_numpys_64_bits_are_rounded_once():
    """1 + 2**-4 is E4M3FN's tie between 1 and 1.125; what is added to it is lost in float32."""
    x = np.array([1.0625 + 2.0**-40, 1.0625, 1.0625 - 2.0**-40])
    after = cast_tree({"x": x, "y": 1.0625 + 2.0**-40, "z": jnp.float32(1.0625)}, "e4m3fn")
    np.testing.assert_array_equal(after["x"].astype(np.float32), [1.125, 1, 1])
    assert (float(after["y"]), float(after["z"])) == (1.125, 1)
    options = {"rounding": "stochastic", "key": KEY}
    drawn = cast_tree({"x": x}, "e4m3fn", **options)["x"]
    key = jax.random.fold_in(KEY, zlib.crc32(b"x"))
    assert_identical(drawn, cast(x, "e4m3fn", rounding="stochastic", key=key))


def test_one_compilation_for_each_structure():
    def of(seed, extra=()):
        return {f"w{i}": jnp.asarray(normal((5, 7), seed=seed + i)) for i in (*range(9), *extra)}

    before = _tree._cast_leaves._cache_size()
    cast_tree(of(0), "e4m3fn")
    cast_tree(of(50), "e4m3fn")
    cast_tree(of(0), Rules({"^w": "F8_E4M3"}))
    assert _tree._cast_leaves._cache_size() == before + 1
    cast_tree(of(0), Rules({"w3": "e5m2"}, default="e4m3fn"))
    cast_tree(of(0, extra=(9,)), "e4m3fn")
    assert _tree._cast_leaves._cache_size() == before + 3


def test_donated_leaves_are_gone_and_the_others_stay():
    before = {
        "narrower": jnp.asarray(normal((64, 64))),
        "as_wide": jnp.asarray(normal((64, 64), np.float16)),
        "kept": jnp.asarray(normal(3)),
        "step": jnp.int32(3),
        "numpy": normal(3),
    }
    rules = Rules({"narrower": "e4m3fn", "as_wide": "bfloat16", "numpy": "e5m2"})
    expected = cast_tree(before, rules)
    assert not any(x.is_deleted() for x in before.values() if isinstance(x, jax.Array))
    watched = weakref.ref(before["narrower"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # JAX warns of buffers that it could not reuse
        after = cast_tree(before, rules, donate=True)
    deleted = {name for name, x in before.items() if isinstance(x, jax.Array) and x.is_deleted()}
    assert deleted == {"narrower", "as_wide"}
    for name, x in expected.items():
        assert_identical(after[name], x, name)
    del before
    gc.collect()
    assert watched() is None


def test_an_array_that_is_in_the_tree_twice_is_not_donated():
    x = jnp.asarray(normal(5))
    after = cast_tree({"a": x, "b": x, "c": x}, Rules({"a|c": "e4m3fn"}), donate=True)
    assert after["b"] is x
    assert_identical(after["a"], cast(normal(5), "e4m3fn"))
    assert not x.is_deleted()
    both = cast_tree({"a": x, "b": x}, "float32", donate=True)
    assert_identical(both["a"], both["b"])


def test_under_jit_and_in_shapes():
    before = {"w": jnp.asarray(normal((3, 2))), "i": jnp.arange(3)}
    jitted = jax.jit(lambda t: cast_tree(t, "e4m3fn", donate=True))(before)
    assert_identical(jitted["w"], cast(normal((3, 2)), "e4m3fn"))
    shapes = jax.eval_shape(lambda t: cast_tree(t, "e4m3fn"), before)
    assert (shapes["w"].shape, shapes["w"].dtype) == ((3, 2), jnp.float8_e4m3fn)

    abstract = jax.eval_shape(lambda: before)
    options = {"rounding": "stochastic", "key": KEY, "donate": True}
    for got in (cast_tree(abstract, "e4m3fn"), cast_tree(abstract, "e4m3fn", **options)):
        assert got == {
            "w": jax.ShapeDtypeStruct((3, 2), jnp.float8_e4m3fn),
            "i": abstract["i"],
        }
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    placed = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=sharding)
    assert cast_tree([placed], "e5m2")[0].sharding == sharding


def test_gradients_go_through_results_of_16_bits():
    x = {"w": jnp.asarray([1.0, 1e6])}
    grads = jax.grad(lambda t: cast_tree(t, "float16")["w"].astype(jnp.float32).sum())(x)
    np.testing.assert_array_equal(grads["w"], [1, 0])
    with pytest.raises(TypeError, match="differentiate fake_cast"):
        jax.grad(lambda t: cast_tree(t, "e5m2")["w"].astype(jnp.float32).sum())(x)


def test_trees_without_leaves():
    for empty in ({}, None, [], ((), {"a": None})):
        assert cast_tree(empty, "e4m3fn") == empty
    assert float(cast_tree(jnp.float32(1.1), "e4m3fn")) == 1.125


class Model(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(4, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


def test_nnx_states_models_and_plain_dicts_agree():
    model = Model(nnx.Rngs(0))
    state = nnx.state(model, nnx.Param)
    options = {"rounding": "stochastic", "key": KEY}
    rules = Rules({"blocks/0/kernel$": "e4m3fn"}, default="bfloat16")
    after = cast_tree(state, rules, **options)
    assert isinstance(after, nnx.State)
    plain = cast_tree(nnx.to_pure_dict(state), rules, **options)
    jax.tree.map(assert_identical, nnx.to_pure_dict(after), plain)
    assert plain["blocks"][0]["kernel"].dtype == jnp.float8_e4m3fn
    assert plain["blocks"][1]["scale"].dtype == jnp.bfloat16

    everything = cast_tree(nnx.state(model), "bfloat16")  # keys and counts of the RNG stay
    assert everything["dropout"]["rngs"]["count"][...].dtype == jnp.uint32
    whole = cast_tree(model, "bfloat16")
    assert isinstance(whole, Model)
    assert whole.blocks[0].kernel.dtype == jnp.bfloat16
    assert model.blocks[0].kernel.dtype == jnp.float32


def test_linen_parameters_and_optimizer_states():
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            init = linen.with_partitioning(linen.initializers.lecun_normal(), ("a", "b"))
            return linen.Dense(3, kernel_init=init)(x)

    with jax.numpy_dtype_promotion("standard"):
        variables = Net().init(jax.random.key(0), jnp.ones((2, 4)))
    after = cast_tree(variables, Rules({"Dense_0/kernel$": "e5m2"}))
    box = after["params"]["Dense_0"]["kernel"]
    assert (box.value.dtype, box.names) == (jnp.float8_e5m2, ("a", "b"))
    assert after["params"]["Dense_0"]["bias"].dtype == jnp.float32

    with jax.numpy_dtype_promotion("standard"):
        state = optax.adamw(1e-3).init({"w": jnp.ones(3)})
    moments = cast_tree(state, "bfloat16")
    assert jax.tree.structure(moments) == jax.tree.structure(state)
    assert moments[0].mu["w"].dtype == moments[0].nu["w"].dtype == jnp.bfloat16
    assert moments[0].count is state[0].count


@pytest.mark.parametrize(
    ("fmt", "options", "error", "message"),
    [
        (Rules({"b/1": "e5m2"}), {}, TypeError, "^cast_tree: b/1: x has dtype complex64, expected"),
        (Rules({"key": "e5m2"}), {}, TypeError, "^cast_tree: key: x has dtype key<fry>, expected"),
        (Rules({"name": "e5m2"}), {}, TypeError, "^cast_tree: name: x has type str, expected"),
        (Rules({"a": "e5m2", "c": "e5m2"}), {}, ValueError, "^cast_tree: rule 'c' matches nothing"),
        (
            Rules({"c": None}),
            {},
            ValueError,
            "^cast_tree: rule 'c' matches nothing.* there is a, b",
        ),
        (Rules({"a": "e4m4"}), {}, ValueError, "^Rules: rule 'a': format: unknown format 'e4m4'"),
        (
            Rules({"a": "e3m2fn"}),
            {},
            TypeError,
            "^Rules: rule 'a': cast_tree: format e3m2fn has no",
        ),
        ("e3m2fn", {}, TypeError, "^cast_tree: format e3m2fn has no numpy or JAX dtype.* encode"),
        ("e4m4", {}, ValueError, "^format: unknown format 'e4m4'"),
        ("float64", {}, TypeError, "^cast_tree: a: format float64 needs 64-bit types.*jax_enable"),
        ("e5m2", {"rounding": "up"}, ValueError, "^cast_tree: rounding='up', expected one of"),
        ("e5m2", {"saturation": "up"}, ValueError, "^cast_tree: saturation='up', expected one"),
        ("e5m2", {"rounding": "stochastic"}, ValueError, "^cast_tree: a: .* neither key nor"),
        (
            "e5m2",
            {"rounding": "stochastic", "key": 5},
            TypeError,
            "^cast_tree: a: key has type int",
        ),
        ("e5m2", {"key": KEY}, ValueError, "^cast_tree: a: key is given, but rounding="),
    ],
)
def test_errors_name_the_leaf_or_the_rule(fmt, options, error, message):
    leaves = {"a": jnp.ones(3), "b": [jnp.ones(1), jnp.ones(1, jnp.complex64)]}
    leaves |= {"key": jax.random.key(0), "name": "text"}
    with pytest.raises(error, match=message):
        cast_tree(leaves, fmt, **options)


@pytest.mark.devices(4)
@pytest.mark.sample("AxisType.Auto")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_leaves_stay_where_they_are(kind):
    """On four devices, one mesh of them in another order."""
    devices = np.array(jax.devices()[:4])
    mesh = Mesh(devices.reshape(2, 2), ("a", "b"), axis_types=(kind,) * 2)
    other = Mesh(devices[[3, 1, 0, 2]], ("c",), axis_types=(kind,))
    host = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    places = {
        "both": NamedSharding(mesh, P("a", "b")),
        "rows": NamedSharding(mesh, P(("b", "a"))),
        "copies": NamedSharding(mesh, P()),
        "other": NamedSharding(other, P(None, "c")),
        "one": devices[2],
    }
    for options in ({}, {"rounding": "stochastic", "key": KEY}):
        whole = {**dict.fromkeys(places, host), "free": jnp.asarray(host)}
        expected = cast_tree(whole, "e4m3fn", **options)
        for donate in (False, True):
            tree = {name: jax.device_put(host, place) for name, place in places.items()}
            tree["free"] = jnp.array(host)
            was = {name: (x.sharding, x.committed) for name, x in tree.items()}
            got = cast_tree(tree, "e4m3fn", donate=donate, **options)
            for name, (sharding, committed) in was.items():
                assert got[name].sharding.is_equivalent_to(sharding, 2), (name, got[name].sharding)
                assert got[name].committed == committed, name
                assert tree[name].is_deleted() == donate
                np.testing.assert_array_equal(np.asarray(got[name]), np.asarray(expected[name]))
    with jax.set_mesh(mesh):
        tree = {name: jax.device_put(host, places[name]) for name in ("both", "rows")}
        got = jax.jit(lambda tree: cast_tree(tree, "e4m3fn"))(tree)
    for name, x in got.items():
        assert x.sharding.is_equivalent_to(places[name], 2), (name, x.sharding)
