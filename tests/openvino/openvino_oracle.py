"""The core of the installed OpenVINO: operators evaluated one at a time, without a plugin."""

import sys
from typing import Any

import ml_dtypes
import numpy as np

# Its telemetry would fork this process, whose threads (JAX's) may then wait for ever.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

import openvino  # noqa: E402
import openvino.opset16 as operators  # noqa: E402

TYPES = {
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
    "f8e4m3": ml_dtypes.float8_e4m3fn,
    "f8e5m2": ml_dtypes.float8_e5m2,
    "f8e8m0": ml_dtypes.float8_e8m0fnu,
    "boolean": np.bool_,
    **{f"i{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"u{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
}
_NAMES = {np.dtype(dtype): name for name, dtype in TYPES.items()}


def element(name: str) -> Any:
    return getattr(openvino.Type, name)


def parameter(x: np.ndarray) -> Any:
    return operators.parameter(list(x.shape), element(_NAMES[x.dtype]))


def _tensor(x: np.ndarray) -> Any:
    x = np.asarray(x, order="C")  # keeps rank 0
    if x.dtype.isbuiltin == 1:  # not those of ml_dtypes
        return openvino.Tensor(x)
    bits = x.view(f"uint{8 * x.dtype.itemsize}")
    return openvino.Tensor(bits, list(x.shape), element(_NAMES[x.dtype]))


def evaluate(node: Any, inputs: list[np.ndarray], name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The output of a node, of element type `name`."""
    output = openvino.Tensor(element(name), openvino.Shape(list(shape)))
    assert node.evaluate([output], [_tensor(x) for x in inputs])
    return np.array(output.data).view(TYPES[name])


def fake_convert(
    data: np.ndarray, scale: np.ndarray, shift: np.ndarray | None, destination: str
) -> np.ndarray:
    inputs = [data, scale] + ([] if shift is None else [shift])
    node = operators.fake_convert(*map(parameter, inputs), destination_type=destination)
    return evaluate(node, inputs, _NAMES[data.dtype], data.shape)


def convert(x: np.ndarray, name: str) -> np.ndarray:
    return evaluate(operators.convert(parameter(x), name), [x], name, x.shape)


def converted_to_nibbles(x: np.ndarray, name: str) -> np.ndarray:
    """Codes of a type of four bits, two to a byte, one code to an element."""
    output = openvino.Tensor(element(name), openvino.Shape(list(x.shape)))
    assert operators.convert(parameter(x), name).evaluate([output], [_tensor(x)])
    packed = np.array(output.data).view(np.uint8).ravel()
    return np.stack([packed & 15, packed >> 4], axis=-1).ravel()[: x.size].reshape(x.shape)


def range(start: np.ndarray, stop: np.ndarray, step: np.ndarray, name: str) -> np.ndarray:
    inputs = [start, stop, step]
    node = operators.range(*map(parameter, inputs), name)
    output = openvino.Tensor(element(name), openvino.Shape([0]))
    assert node.evaluate([output], [_tensor(x) for x in inputs])
    return np.array(output.data).view(TYPES[name])


def promoted_type(
    types: tuple[str, str], ranks: tuple[int | None, int | None], **attributes: Any
) -> str:
    """What the node infers; RuntimeError with its message where it refuses."""
    shapes = [
        openvino.PartialShape.dynamic() if rank is None else openvino.PartialShape([2] * rank)
        for rank in ranks
    ]
    inputs = [
        operators.parameter(shape, element(name)) for name, shape in zip(types, shapes, strict=True)
    ]
    node = operators.convert_promote_types(*inputs, **attributes)
    inferred = {node.get_output_element_type(i).get_type_name() for i in (0, 1)}
    (name,) = inferred
    return name


def bfloat16_of_the_core(x: np.ndarray) -> np.ndarray:
    """float32 as its class bfloat16 rounds it: truncated after an even bit, else half up."""
    bits = x.view(np.uint32)
    return ((bits + ((bits & 0x10000) >> 1)) >> 16).astype(np.uint16).view(ml_dtypes.bfloat16)


def assert_same_numbers(got: Any, expected: np.ndarray) -> None:
    """Equal bits, but for those of NaNs."""
    got = np.asarray(got)
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    width = f"uint{8 * expected.dtype.itemsize}"
    same = got.view(width) == expected.view(width)
    if expected.dtype.kind in "fV":
        same |= np.isnan(got) & np.isnan(expected)
    wrong = np.flatnonzero(~same)
    assert wrong.size == 0, (
        wrong.size,
        [(int(i), got.ravel()[i], expected.ravel()[i]) for i in wrong[:5]],
    )
