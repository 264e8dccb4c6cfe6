"""The official node tests of the seven operators, run against qtoolkit.onnx.

Oracle: the cases of onnx's own backend tests, which it builds when they are imported, compared as
its runner compares them. `_expanded` cases are graphs of simpler nodes; those that are none of the
seven operators are left to onnx's reference evaluator.
"""

import importlib
import warnings

import jax
import numpy as np
import pytest

from qtoolkit import onnx as ops

# How many cases each operator has in onnx 1.23.
CASES = {
    "test_cast_": 60,
    "test_castlike_": 112,
    "test_quantizelinear": 13,
    "test_dequantizelinear": 14,
    "test_dynamicquantizelinear": 6,
    "test_range_": 8,
    "test_bitcast": 10,
}
MODULES = ("cast", "castlike", "quantizelinear", "dequantizelinear", "dynamicquantizelinear")
MODULES += ("rangeop", "bitcast")
calls: list[str] = []  # operators that the case under way has run here
# Technical note float4: NaN becomes +6 (code 7). The cases expect what ml_dtypes gives: zero.
NAN_TO_FLOAT4 = {
    "test_cast_FLOAT_to_FLOAT4E2M1",
    "test_cast_FLOAT16_to_FLOAT4E2M1",
    "test_castlike_FLOAT_to_FLOAT4E2M1",
    "test_castlike_FLOAT_to_FLOAT4E2M1_expanded",
    "test_castlike_FLOAT16_to_FLOAT4E2M1",
    "test_castlike_FLOAT16_to_FLOAT4E2M1_expanded",
}


def operator(run_class, name, call):
    """A node of a graph as a call of qtoolkit.onnx, for onnx's reference evaluator."""

    def _run(self, *inputs, **attributes):
        given = {key: value for key, value in attributes.items() if value is not None}
        with jax.enable_x64(True):
            outputs = call(*inputs, opset=self.run_params["opsets"][""], **given)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        calls.append(name)
        return tuple(map(np.asarray, outputs))

    return type(name, (run_class,), {"_run": _run, "op_domain": ""})


@pytest.fixture(scope="module")
def results():
    """By name of the case: its inputs, outputs, expected ones, and the error of the comparison."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other operators' cases overflow when they are built
        from onnx.backend.base import Backend, BackendRep
        from onnx.backend.test.case import node
        from onnx.backend.test.runner import Runner, _normalize_tensor
        from onnx.reference import ReferenceEvaluator
        from onnx.reference.op_run import OpRun
        from onnx.reference.ops.op_loop import Loop as ReferenceLoop

        # onnx's loader imports its cases of all operators, which takes 12 seconds.
        for operator_module in MODULES:
            importlib.import_module(f"{node.__name__}.{operator_module}")
        cases = [case for case in node._NodeTestCases if case.name.startswith(tuple(CASES))]

    class Loop(ReferenceLoop):
        """Scalars of each turn make a vector; the reference evaluator makes them a column."""

        op_domain = ""

        def _run(self, *args, **kwargs):
            outputs = super()._run(*args, **kwargs)
            scans = (np.reshape(column, len(column)) for column in outputs[self.N :])
            return (*outputs[: self.N], *scans)

    functions = {
        "Cast": ops.cast,
        "CastLike": ops.cast_like,
        "QuantizeLinear": ops.quantize_linear,
        "DequantizeLinear": ops.dequantize_linear,
        "DynamicQuantizeLinear": ops.dynamic_quantize_linear,
        "Range": ops.range,
        "BitCast": ops.bit_cast,
    }
    operators = [Loop, *(operator(OpRun, name, call) for name, call in functions.items())]

    class Prepared(BackendRep):
        def __init__(self, model):
            self.model = ReferenceEvaluator(model, new_ops=operators)

        def run(self, inputs, **kwargs):
            feeds = dict(zip(self.model.input_names, inputs, strict=True))
            return tuple(self.model.run(None, feeds))

    class QtoolkitBackend(Backend):
        @classmethod
        def prepare(cls, model, device="CPU", **kwargs):
            return Prepared(model)

        @classmethod
        def supports_device(cls, device):
            return device == "CPU"

    found = {}
    for case in cases:
        prepared = QtoolkitBackend.prepare(case.model)
        for given, wanted in case.data_sets:
            inputs, expected = ([_normalize_tensor(x) for x in side] for side in (given, wanted))
            calls.clear()
            outputs = prepared.run(inputs)
            assert calls, f"{case.name} ran without qtoolkit"
            error = None
            try:
                Runner.assert_similar_outputs(expected, outputs, case.rtol, case.atol)
            except AssertionError as difference:
                error = str(difference)
            found[case.name] = (inputs, outputs, expected, error)
    return found


@pytest.mark.parametrize("prefix", CASES)
def test_official_cases_pass_or_contradict_a_published_page(results, prefix):
    mine = {name: result for name, result in results.items() if name.startswith(prefix)}
    assert len(mine) == CASES[prefix]
    failed = {name: error for name, (_, _, _, error) in mine.items() if error is not None}
    assert set(failed) == {name for name in NAN_TO_FLOAT4 if name.startswith(prefix)}, failed


def test_all_cases_were_run_and_all_deviations_are_known(results):
    assert len(results) == sum(CASES.values()) == 223
    assert {name for name, result in results.items() if result[3] is not None} == NAN_TO_FLOAT4


@pytest.mark.parametrize("name", sorted(NAN_TO_FLOAT4))
def test_deviations_are_no_more_than_that(results, name):
    (x, *_), (got,), (expected,), _ = results[name]
    assert got.dtype == expected.dtype
    is_nan = np.isnan(x.astype(np.float32))
    assert is_nan.sum() == 1
    got, expected = (codes.view(np.uint8) for codes in (got, expected))
    np.testing.assert_array_equal(got[~is_nan], expected[~is_nan])
    np.testing.assert_array_equal(got[is_nan], 7)  # +6
    assert expected[is_nan][0] in (0, 8)
