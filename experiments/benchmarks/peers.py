"""How other libraries cast the same array: a function each, which returns the call to time.

Every function takes a NumPy array (float32, float16 or bfloat16) and "e4m3fn" or "e5m2", and does
what it can outside the call. All of them saturate, as `qtoolkit` does by default. Libraries with
threads of their own get as many as the machine has.
"""

import dataclasses
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

Call = Callable[[], Any]
THREADS = os.cpu_count() or 1
MAX = {"e4m3fn": 448.0, "e5m2": 57344.0}


# To codes, or to the library's own 8-bit type.


def ml_dtypes_codes(host: np.ndarray, fmt: str) -> Call:
    # On one core. The limits have the array's dtype, or NumPy would widen 16 bits to 64.
    limit = host.dtype.type(MAX[fmt])
    return lambda: np.clip(host, -limit, limit).astype(f"float8_{fmt}")


def torch_codes(host: np.ndarray, fmt: str) -> Call:
    import torch

    x = torch_tensor(host)
    return lambda: x.clamp(-MAX[fmt], MAX[fmt]).to(getattr(torch, f"float8_{fmt}"))


def onnxruntime_codes(host: np.ndarray, fmt: str) -> Call:
    import onnxruntime
    from onnx import TensorProto, helper

    source = {
        "float32": TensorProto.FLOAT,
        "float16": TensorProto.FLOAT16,
        "bfloat16": TensorProto.BFLOAT16,
    }[host.dtype.name]
    target = {"e4m3fn": TensorProto.FLOAT8E4M3FN, "e5m2": TensorProto.FLOAT8E5M2}[fmt]
    graph = helper.make_graph(
        [helper.make_node("Cast", ["x"], ["y"], to=target, saturate=1)],
        "cast",
        [helper.make_tensor_value_info("x", source, [host.size])],
        [helper.make_tensor_value_info("y", target, [host.size])],
    )
    opset = helper.make_opsetid("", 21)
    model = helper.make_model(graph, opset_imports=[opset], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    bits = host.view(np.uint16) if host.dtype == ml_dtypes.bfloat16 else host
    x = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, source)
    return lambda: session.run_with_ort_values(None, {"x": x})


def openvino_codes(host: np.ndarray, fmt: str) -> Call:
    opset13 = import_openvino().opset13
    # OpenVINO calls E4M3FN f8e4m3; its Convert does not saturate.
    target = {"e4m3fn": "f8e4m3", "e5m2": "f8e5m2"}[fmt]
    return openvino_call(
        host, lambda x: opset13.convert(opset13.clamp(x, -MAX[fmt], MAX[fmt]), target)
    )


def gfloat_codes(host: np.ndarray, fmt: str) -> Call:
    import gfloat

    info = gfloat_format(fmt)
    return lambda: gfloat.encode_ndarray(info, gfloat.round_ndarray(info, host, sat=True))


def qwix_codes(host: np.ndarray, fmt: str) -> Call:
    import qwix

    # The calibration that makes the scale 1: a cast is what remains of quantization.
    fixed = f"fixed,-{MAX[fmt]},{MAX[fmt]}"
    quantize = jax.jit(lambda x: qwix.quantize(x, f"float8_{fmt}", calibration_method=fixed))
    x = jnp.asarray(host)
    return lambda: quantize(x)


def qwix_nf4_codes(host: np.ndarray, fmt: str) -> Call:
    import qwix

    quantize = jax.jit(lambda x: qwix.quantize(x, fmt, calibration_method="fixed,-1,1"))
    x = jnp.asarray(host)
    return lambda: quantize(x)


# To the values of the format, in the dtype of the array.


def torch_values(host: np.ndarray, fmt: str) -> Call:
    import torch

    x = torch_tensor(host)
    narrow = getattr(torch, f"float8_{fmt}")
    return lambda: x.clamp(-MAX[fmt], MAX[fmt]).to(narrow).to(x.dtype)


def openvino_values(host: np.ndarray, fmt: str) -> Call:
    opset13 = import_openvino().opset13
    target = {"e4m3fn": "f8e4m3", "e5m2": "f8e5m2"}[fmt]

    def fake_convert(x: Any) -> Any:
        scale = opset13.constant(1.0, x.get_element_type())
        return opset13.fake_convert(x, scale, destination_type=target)

    return openvino_call(host, fake_convert)


def gfloat_values(host: np.ndarray, fmt: str) -> Call:
    import gfloat

    info = gfloat_format(fmt)
    rounded = jax.jit(lambda x: gfloat.round_ndarray(info, x, sat=True))
    x = jnp.asarray(host)
    return lambda: rounded(x)


def pychop_values(host: np.ndarray, fmt: str) -> Call:
    os.environ["chop_backend"] = "jax"  # noqa: SIM112  unset, the import prints a page of warnings
    import pychop

    # Exponent and mantissa bits. It overflows by rules of its own: Inf, and 0 beyond 256 in E4M3.
    chop = jax.jit(pychop.Chop(*{"e4m3fn": (4, 3), "e5m2": (5, 2)}[fmt]))
    x = jnp.asarray(host)
    return lambda: chop(x)


# What several of the above share.


def torch_tensor(host: np.ndarray) -> Any:
    import torch

    torch.set_num_threads(THREADS)
    if host.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(host.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(host.copy())


def import_openvino() -> Any:
    # Its telemetry would fork this process, whose threads (JAX's) may then wait for ever.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import openvino
    import openvino.opset13

    return openvino


def openvino_call(host: np.ndarray, build: Callable[[Any], Any]) -> Call:
    openvino = import_openvino()
    dtype = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[host.dtype.name]
    element = getattr(openvino.Type, dtype)
    x = openvino.opset13.parameter([host.size], element)
    config = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": THREADS,
        "INFERENCE_PRECISION_HINT": "f32",  # else newer processors round to bfloat16 first
    }
    model = openvino.Model([build(x)], [x])
    request = openvino.Core().compile_model(model, "CPU", config).create_infer_request()
    bits = host.view(np.uint16) if host.dtype == ml_dtypes.bfloat16 else host
    request.set_input_tensor(openvino.Tensor(bits, [host.size], element))
    return request.infer


def gfloat_format(fmt: str) -> Any:
    from gfloat import formats

    return {"e4m3fn": formats.format_info_ocp_e4m3, "e5m2": formats.format_info_ocp_e5m2}[fmt]


@dataclasses.dataclass(frozen=True)
class Peer:
    """A row of a table.

    Attributes:
      slow: Timed five times, and not on more than 2^20 elements.
      promised: The target is to be as fast or faster; by how much, the table says.
    """

    name: str
    make: Callable[[np.ndarray, str], Call]
    packages: tuple[str, ...]
    slow: bool = False
    promised: bool = False


CODES = (
    Peer("ml_dtypes clip, astype", ml_dtypes_codes, ("ml_dtypes",), promised=True),
    Peer("PyTorch clamp, to", torch_codes, ("torch",), promised=True),
    Peer("ONNX Runtime Cast", onnxruntime_codes, ("onnx", "onnxruntime"), promised=True),
    Peer("OpenVINO Clamp, Convert", openvino_codes, ("openvino",), promised=True),
    Peer("qwix.quantize, scale 1", qwix_codes, ("qwix",), promised=True),
    Peer("gfloat round, encode", gfloat_codes, ("gfloat",), slow=True),
)
VALUES = (
    Peer("PyTorch clamp, to, to", torch_values, ("torch",)),
    Peer("OpenVINO FakeConvert", openvino_values, ("openvino",)),
    Peer("gfloat round_ndarray in jit", gfloat_values, ("gfloat",), slow=True),
    Peer("pychop Chop in jit", pychop_values, ("pychop",), slow=True),
)
NF4 = (Peer("qwix.quantize, scale 1", qwix_nf4_codes, ("qwix",), slow=True),)


def usable(peers: tuple[Peer, ...], size: int) -> Iterator[Peer]:
    """The peers that can be timed at that size; a line about each of the others."""
    for peer in peers:
        missing = [package for package in peer.packages if not importlib.util.find_spec(package)]
        if missing:
            print(
                f"(no row {peer.name!r}: {' and '.join(missing)} not installed; "
                "pip install '.[bench]')"
            )
        elif peer.slow and size > 2**20:
            print(f"(no row {peer.name!r} at {size:,} elements: see 2^20)")
        else:
            yield peer
