"""The examples of docstrings: every public name has one, and prints what stands there."""

import doctest
import importlib
import inspect

import examples
import pytest

import qtoolkit as qt

# What an example may use without importing it; the index of the reference shows it.
NAMES: dict = {}
exec(examples.DOCSTRING_IMPORTS, NAMES)

# Nobody makes these: they are what a function returns. Its example stands for theirs.
SHOWN_BY = {
    "scaling.Metrics": "scaling.metrics",
    "post_training.Allocation": "nnx.allocate",
    "products.Calibration": "nnx.calibrate",
    "post_training.InputStatistics": "nnx.calibrate",
    "products.Numerics": "nnx.numerics",
    "products.Product": "nnx.report",
    "products.Report": "nnx.report",
    "products.Sensitivity": "nnx.sensitivity",
    "optim.MasterWeightsState": "optim.master_weights",
    "optim.QuantizedState": "optim.quantize_state",
    "optim.StochasticRoundState": "optim.stochastic_round_updates",
    "checkpoints.CheckpointComparison": "checkpoints.compare",
    "checkpoints.Export": "checkpoints.export",
    "checkpoints.Plan": "checkpoints.export",
    "checkpoints.Report": "checkpoints.convert",
    "checkpoints.TensorComparison": "checkpoints.compare",
    "checkpoints.TensorPlan": "checkpoints.export",
    "checkpoints.TensorReport": "checkpoints.convert",
    "checkpoints.Verification": "checkpoints.verify",
}


def public():
    """What the reference documents by docstrings, by name: "casts.encode"."""
    found = {}
    for package in qt._NAMES_BY_PACKAGE:
        module = importlib.import_module(f"qtoolkit.{package}")
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isroutine(value) or inspect.isclass(value):
                found[f"{package}.{name}"] = value
    return found


PUBLIC = public()


def examples_of(value, name):
    """The doctests of a function, or of a class and its methods, in the order of their lines."""
    found = doctest.DocTestFinder().find(value, name, globs=NAMES)
    return [test for test in found if test.examples]


def failures(value, name):
    """What doctest says of the examples that print something else than their docstring says."""
    said = []
    for test in examples_of(value, name):
        doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    return "".join(said)


def cases():
    """Those of the packages without Flax are `quick`, and part of `make test`."""
    quick = ("formats", "casts", "onnx", "openvino", "pypto")
    return [
        pytest.param(
            name, marks=pytest.mark.quick if name.split(".")[0] in quick else pytest.mark.docs
        )
        for name in PUBLIC
        if name not in SHOWN_BY
    ]


@pytest.mark.parametrize("name", cases())
def test_the_examples_of_a_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = [test for test in examples_of(PUBLIC[name], name) if test.name == name]
    assert own, f"the docstring of qtoolkit.{name} has no example"
    assert len(own[0].examples) <= 6
    assert failures(PUBLIC[name], name) == ""


@pytest.mark.quick
@pytest.mark.parametrize("name", SHOWN_BY)
def test_a_name_without_an_example_is_shown_by_another(name):
    assert not examples_of(PUBLIC[name], name)
    assert examples_of(PUBLIC[SHOWN_BY[name]], name)
