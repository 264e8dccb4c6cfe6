"""What compiled programs multiply in FP8. Oracle: programs whose text is written out here, as XLA
wrote it for an H100, and what this machine's own compiler does. `make cuda` has whole programs.
"""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from refused import refused

import qtoolkit as qt
from qtoolkit.products import Gpu, expected_gain, native_calls

FOR_A_GPU = """HloModule jit_step, is_scheduled=true

FileNames
1 "/lib/site-packages/flax/nnx.py"
2 "/home/me/model.py"

FunctionNames
1 "Linear.__call__"
2 "MLP.__call__"

FileLocations
1 {file_name_id=1 function_name_id=1 line=5 end_line=5 column=1 end_column=2}
2 {file_name_id=2 function_name_id=2 line=17 end_line=17 column=1 end_column=2}

StackFrames
1 {file_location_id=2 parent_frame_id=1}
2 {file_location_id=1 parent_frame_id=2}

%nested (p.1: f8e5m2[64,32]) -> f8e5m2[64,32] {
  %p.1 = f8e5m2[64,32]{1,0} parameter(0)
  ROOT %n.1 = f8e5m2[64,32]{1,0} negate(%p.1)
}

%gemm (a: f8e5m2[64,32], b: bf16[16,32]) -> bf16[64,16] {
  %a = f8e5m2[64,32]{1,0} parameter(0)
  %b = bf16[16,32]{1,0} parameter(1)
  %c.1 = f8e5m2[64,32]{1,0} fusion(%a), kind=kCustom, calls=%nested
  ROOT %dot.1 = bf16[64,16]{1,0} dot(%c.1, %b), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

%body (s: (s32[], f32[8])) -> (s32[], f32[8]) {
  %s = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %v = f32[8]{0} get-tuple-element(%s), index=1
  %exp.1 = f32[8]{0} exponential(%v)
  ROOT %t = (s32[], f32[8]{0}) tuple(%i, %exp.1)
}

%condition (s: (s32[], f32[8])) -> pred[] {
  %s.1 = (s32[], f32[8]{0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (x: f8e4m3fn[64,32], w: f8e4m3fn[16,32]) -> bf16[64,16] {
  %x = f8e4m3fn[64,32]{1,0} parameter(0)
  %w = f8e4m3fn[16,32]{1,0} parameter(1)
  %g = f8e5m2[64,32]{1,0} parameter(2)
  %h = bf16[16,32]{1,0} parameter(3)
  %one = f32[] constant(1)
  %cublas-gemm.1 = (bf16[64,16]{1,0}, s8[4194304]{0}) \
custom-call(%x, %w, %one, /*index=3*/%one), custom_call_target="__cublas$lt$matmul$f8", \
metadata={op_name="jit(step)/jvp(up)/dot_general" stack_frame_id=2}, \
backend_config={"alpha":"(1)"}
  %fused = bf16[64,16]{1,0} fusion(%g, %h), kind=kCustom, calls=%gemm, \
metadata={op_name="jit(step)/transpose(jvp(up))/dot_general"}, \
backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}
  %start = (s32[], f32[8]{0}) tuple(%one, %one)
  %loop = (s32[], f32[8]{0}) while(%start), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"5"}}
  ROOT %out = bf16[64,16]{1,0} get-tuple-element(%cublas-gemm.1), index=0
}
"""


def test_calls_of_libraries_and_fusions_are_told_apart():
    found = native_calls(FOR_A_GPU)
    first, second = found.calls
    assert first.operands == ("f8e4m3fn[64,32]", "f8e4m3fn[16,32]")
    assert (first.result, first.by, first.part) == ("bf16[64,16]", "cuBLASLt", "forward")
    assert (first.where, first.is_fp8) == ("model.py:17", True)
    assert first.bytes == 64 * 32 + 16 * 32 + 2 * 4 + 2 * 64 * 16  # not the workspace
    assert second.operands == ("f8e5m2[64,32]", "bf16[16,32]")  # as the kernel multiplies them
    assert (second.by, second.part, second.is_fp8) == ("Triton", "backward", False)
    assert found.in_fp8 == (first,)
    assert (found.kernels, found.other_bytes) == (5, 5 * 2 * 32)  # the loop's exponential
    assert str(found).splitlines()[-1] == (
        "1 of 2 matmuls multiply in FP8; 5 other kernels read and write 0 MB"
    )


def test_here_nothing_runs_in_fp8_and_loops_count():
    recipe = qt.recipes.native_fp8_current
    numbers = (((1,), (0,)), ((), ()))

    def step(x, w):
        def body(x, _):
            return qt.dot_general(x, w, numbers, recipe=recipe), None

        return jax.lax.scan(body, x, None, length=3)[0]

    x, w = jnp.ones((32, 64), jnp.bfloat16), jnp.ones((64, 64), jnp.bfloat16)
    compiled = jax.jit(step).lower(x, w).compile()
    found = native_calls(compiled)
    assert found == native_calls(compiled.as_text())
    assert [call.times for call in found.calls] == [3]
    assert not found.in_fp8


def test_what_is_not_compiled_is_refused():
    lowered = jax.jit(jnp.sin).lower(1.0)
    refused(TypeError, r"native_calls: got Lowered", native_calls, lowered)
    refused(ValueError, "no ENTRY computation", native_calls, lowered.as_text())


def test_a_report_shows_what_a_compiled_step_runs():
    model = qt.nnx.wrap(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), qt.recipes.native_fp8_current)
    x = jnp.ones((2, 8))
    graph, state = nnx.split(model)
    compiled = jax.jit(lambda s, x: nnx.merge(graph, s)(x)).lower(state, x).compile()
    report = qt.nnx.report(model, x, compiled=compiled)
    assert report.compiled == native_calls(compiled)
    assert str(report).endswith(str(report.compiled))
    assert qt.nnx.report(model, x).compiled is None


# The estimate.

GPU = Gpu("a GPU", fp8=2e12, bfloat16=1e12, bandwidth=1e12, launch=0.0)


def test_the_estimate_counts_operations_and_bytes():
    """By hand: 2 * 100**3 operations, three times; 10,000 elements in each of three arrays."""
    x = jax.ShapeDtypeStruct((100, 100), jnp.bfloat16)
    (one,) = expected_gain(jnp.dot, x, x, gpu=GPU).matmuls
    assert (one.batch, one.m, one.k, one.n, one.count) == (1, 100, 100, 100, 1)
    assert one.plain == pytest.approx(6e6 / 1e12)
    assert one.native == pytest.approx(6e6 / 2e12 + 5 * 30000 / 1e12)
    slow = Gpu("a slow GPU", fp8=2e12, bfloat16=1e12, bandwidth=1e9)
    (one,) = expected_gain(jnp.dot, x, x, gpu=slow).matmuls
    assert one.plain == pytest.approx(6 * 30000 / 1e9 + 3 * 3e-6)
    assert one.native == pytest.approx((4 + 5) * 30000 / 1e9 + 14 * 3e-6)


def test_the_estimate_finds_matmuls_in_loops_and_branches():
    x = jax.ShapeDtypeStruct((2, 8, 4), jnp.bfloat16)

    def function(x):
        def body(x, _):
            y = jnp.einsum("bij,bkj->bik", x, x)
            return jnp.einsum("bik,bkl->bil", y, x), None

        x = jax.lax.scan(body, x, None, length=5)[0]
        return jax.jit(lambda x: x @ jnp.ones((4, 3), x.dtype))(x)

    found = expected_gain(function, x)
    shapes = {(m.batch, m.m, m.k, m.n): m.count for m in found.matmuls}
    assert shapes == {(2, 8, 4, 8): 5, (2, 8, 8, 4): 5, (1, 16, 4, 3): 1}
    assert expected_gain(jnp.sin, x).factor == 1.0


def test_small_models_gain_nothing_and_large_ones_do():
    """[8192, 4096] x [4096, 14336] was estimated at 1.6 from compiled programs."""

    def dense(m, k, n):
        structs = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((m, k), (k, n)))
        return expected_gain(jnp.dot, *structs).factor

    assert 1.55 < dense(8192, 4096, 14336) < 1.65
    assert dense(8192, 512, 2048) < 1
    assert "times as fast on an NVIDIA H100 SXM (estimated)" in str(
        expected_gain(jnp.dot, *(jax.ShapeDtypeStruct((64, 64), jnp.bfloat16),) * 2)
    )
