"""Our pytrees in the files of others: all classes, all ways. Oracle: what went in."""

import ast
import copy
import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export
from refused import refused

import qtoolkit as qt
from qtoolkit import optim, products, scaling
from qtoolkit.casts import Projection, Stochastic
from qtoolkit.casts.internal import projection_of
from qtoolkit.formats import Rules
from qtoolkit.post_training import InputStatistics
from qtoolkit.products import Calibration, Numerics, Product, Sensitivity
from qtoolkit.products._numerics import Row
from qtoolkit.scaling.internal import TALLY_SIZE, Contraction, tally_of

PACKAGE = Path(qt.__file__).parent
X = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
PARAMS = {"w": jnp.asarray(X), "b": jnp.zeros(64, jnp.bfloat16)}
OWN = qt.TableFormat(name="own", values_by_code=(0.0, 0.125, 4.0, -np.inf))
SPECS = {
    **{name: name for name in ("mxfp4", "nvfp4", "int8", "bfloat16", "int4_group32")},
    "zero points": qt.BlockFormat.channel("uint8", zero_point=True),
    "a format of one's own": qt.BlockFormat.tensor(qt.format("e4m3fn").with_(bias=9)),
    "a table of one's own": qt.BlockFormat(element=OWN, block=(16,)),
}
TALLY = tally_of(jnp.arange(TALLY_SIZE, dtype=jnp.float32))
# Classes whose objects never leave a function of ours.
STAYS_INSIDE = {"Batch", "Cast", "Part", "Planted", "Residuals", "Rounded", "SavedCodes"}
STAYS_INSIDE |= {"StaticResult", "_Opened"}


def observed(kind, **options):
    return kind.of("e4m3fn", (8, 64), **options).observe(X)


def updated(tx):
    return tx.update(PARAMS, tx.init(PARAMS), PARAMS)[1]


def measured():
    row = Row(
        path="a/0", product="0", operand="lhs", parts="forward", fmt="e4m3fn", limits=(0.5, 448.0),
        tally=TALLY,
    )  # fmt: skip
    return Numerics(rows=(row,), left=(Product("a", "forward", "f32 x f32", "a rule"),))


def trees():
    """By name: one tree or more of each class."""
    hessian = scaling.Hessian.of(64).observe(X)
    how = Contraction((0,), (1,))
    recipes = (products.recipes.mxfp8, qt.Recipe(None))
    kernels = ((("w", recipes[0]), ("v", None)),)
    stochastic = projection_of("", (8,), Stochastic("B", 7), "none", jax.random.key(1), None, 3)
    quantized = (optax.adamw(1e-3), Rules({"b": None}, default="e4m3fn"))
    return {
        **{f"QArray {name}": qt.quantize(X, spec) for name, spec in SPECS.items()},
        "QArray packed": qt.quantize(X, "nvfp4", packed=True),
        "QArray with factors": dataclasses.replace(
            qt.quantize(X, "int8"), factors=jnp.ones((1, 64)), rotation=(16, 7, -1)
        ),
        "QArray, a stack": jax.vmap(lambda x: qt.quantize(x, "nvfp4"))(jnp.stack([X, 2 * X])),
        "Projection": Projection("toward_zero", "none"),
        "Projection and Draw": stochastic,
        "Metrics": qt.metrics(X, "int8"),
        "Tally": TALLY,
        "AbsMax": observed(scaling.AbsMax),
        "MovingAverage": observed(scaling.MovingAverage, decay=0.5),
        "MinMax": scaling.MinMax.of(SPECS["zero points"], (8, 64)).observe(X),
        "Percentile": observed(scaling.Percentile, bins=scaling.Bins(mantissa_bits=1)),
        "MSE": observed(scaling.MSE, octaves=2),
        "Hessian": hessian,
        "InputStatistics": InputStatistics((hessian,), (("a/kernel", (0,)),), (how,)),
        "Calibration": Calibration((observed(scaling.AbsMax),), (("a/0", "0", 1),)),
        "Sensitivity": Sensitivity(jnp.arange(3.0), ("a",), recipes[:1], kernels),
        "Numerics": measured(),
        "Row": measured().rows[0],
        "QuantizedState": updated(optim.quantize_state(*quantized, rounding="stochastic")),
        "StochasticRoundState": updated(optim.stochastic_round_updates(seed=7)),
        "MasterWeightsState": updated(optim.master_weights(optax.sgd(0.1, momentum=0.9))),
    }


TREES = trees()


def registered_classes():
    """The names of classes that our sources register as pytrees, and of NamedTuples to store."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                decorators = " ".join(map(ast.unparse, node.decorator_list))
                if any(word in decorators for word in ("serializable", "pytree", "tree_util")):
                    yield node.name


def test_every_class_is_in_the_table():
    stored = {word for name in TREES for word in name.replace(",", "").split()}
    public = {
        name for name in optim.__all__ if hasattr(getattr(optim, name), "_fields")
    }  # optax's transforms hand these to everyone
    assert {*registered_classes(), *public} - stored - STAYS_INSIDE == set()


def zeros_like(tree):
    return jax.tree.map(jnp.zeros_like, tree)


def through_bytes(tree):
    from flax import serialization

    return serialization.from_bytes(zeros_like(tree), serialization.to_bytes(tree))


def through_state_dict(tree):
    from flax import serialization

    return serialization.from_state_dict(zeros_like(tree), serialization.to_state_dict(tree))


def through_export(tree):
    """As the argument and as the result of an exported function."""
    for name in ("EmptyState", "ScaleByAdamState", "TraceState"):  # optax leaves them to its users
        kind = getattr(optax, name)
        if kind not in registered:
            registered.add(kind)
            export.register_namedtuple_serialization(kind, serialized_name=f"optax.{name}")
    data = export.export(jax.jit(lambda tree: tree))(tree).serialize()
    return export.deserialize(data).call(tree)


registered: set[type] = set()
WAYS = {
    "pickle": lambda tree: pickle.loads(pickle.dumps(tree)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "to_bytes": through_bytes,
    "to_state_dict": through_state_dict,
    "jax.export": through_export,
}


def assert_same(got, expected):
    assert type(got) is type(expected)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        mine, theirs = np.asarray(mine), np.asarray(theirs)
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        assert mine.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", TREES)
def test_a_tree_comes_back(name, way):
    assert_same(WAYS[way](TREES[name]), TREES[name])


def test_orbax_stores_all_of_them(tmp_path):
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "trees", TREES)
        checkpointer.wait_until_finished()
        again = checkpointer.restore(tmp_path / "trees", zeros_like(TREES))
    for name, tree in TREES.items():
        assert_same(again[name], tree)


ALONE = """
import sys
import {first}
import jax, numpy as np, qtoolkit as qt
x = np.arange(64, dtype=np.float32).reshape(2, 32)
tree = {{"q": qt.quantize(x, "nvfp4"), "m": qt.metrics(x, "int8")}}
assert ("flax" in sys.modules) == ({first!r} != "sys")
import flax.serialization as fs
again = fs.from_bytes(jax.tree.map(lambda leaf: leaf * 0, tree), fs.to_bytes(tree))
np.testing.assert_array_equal(again["q"].dequantize(), tree["q"].dequantize())
assert float(again["m"].sqnr_db) == float(tree["m"].sqnr_db)
data = jax.export.export(jax.jit(lambda tree: tree["q"].dequantize()))(tree).serialize()
open("exported", "wb").write(data)
assert "qtoolkit.nnx" not in sys.modules and "qtoolkit.linen" not in sys.modules
"""
ELSEWHERE = """
import jax, numpy as np, qtoolkit as qt
import qtoolkit.scaling  # which tells JAX about QArray
exported = jax.export.deserialize(open("exported", "rb").read())
x = np.arange(64, dtype=np.float32).reshape(2, 32)
tree = {"q": qt.quantize(x, "nvfp4"), "m": qt.metrics(x, "int8")}
np.testing.assert_array_equal(exported.call(tree), tree["q"].dequantize())
"""


@pytest.mark.parametrize("first", ["sys", "flax.serialization"])
def test_in_a_process_of_its_own(tmp_path, first):
    """Nothing but these lines is imported, Flax after us and before us; a second process reads."""
    for code in (ALONE.format(first=first), ELSEWHERE):
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr


def test_a_target_of_another_format_is_refused():
    """Its leaves are others: int8 has no tensor scale, which would be dropped."""
    from flax import serialization

    data = serialization.to_bytes({"w": qt.quantize(X, "nvfp4")})
    target = {"w": qt.quantize(X, "int8")}
    refused(ValueError, r"QArray at '\./w'.*tensor_scale", serialization.from_bytes, target, data)


def test_export_refuses_static_data_without_a_text():
    spec = qt.spec("nvfp4").with_(rule=lambda amax, largest: amax / largest)
    array = qt.quantize(X, spec)
    with refused(TypeError, r"export of QArray.*has a function as its rule"):
        export.export(jax.jit(lambda q: q.dequantize()))(array).serialize()
