"""How other libraries quantize the same array with its scales: calls to time, as in `peers`.

Every function takes a NumPy matrix (float32 or bfloat16) and the name of a scheme of `scales.py`,
does what it can outside the call, and returns codes and scales from it. Elements of 4 bits come out
packed, two to a byte, but from qwix, which holds one in each byte.
"""

import math
import os
import shutil
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (registers float8 and float4 with NumPy)
import numpy as np
from peers import Call, Peer, torch_tensor

# Elements along the two axes that share a scale; None for all of them.
BLOCKS = {
    "e4m3fn_tensor": (None, None),
    "e4m3fn_channel": (None, 1),
    "e4m3fn_token": (1, None),
    "int8_tensor": (None, None),
    "int8_channel": (None, 1),
    "mxfp8_e4m3": (1, 32),
    "mxfp4": (1, 32),
    "nvfp4": (1, 16),
    "deepseek_1x128": (1, 128),
    "deepseek_128x128": (128, 128),
}
LARGEST = {"float8_e4m3fn": 448.0, "float4_e2m1fn": 6.0, "int8": 127.0}
LEAST_SCALE = 2.0**-9  # of NVFP4: the smallest positive E4M3


def element(scheme: str) -> str:
    if scheme.startswith("int8"):
        return "int8"
    return "float4_e2m1fn" if scheme.endswith("fp4") else "float8_e4m3fn"


# qwix. Its MX scales are ceilings of a log2, and its NVFP4 has no second scale.


def qwix_quantize(host: np.ndarray, scheme: str) -> Call:
    import qwix

    each, tiles = [], {}
    for axis, length in enumerate(BLOCKS[scheme]):
        if length == 1:
            each.append(axis)
        elif length is not None:
            tiles[axis] = length
    qtype = {"mxfp8_e4m3": "mxfp8", "mxfp4": "mxfp4", "nvfp4": "nvfp4"}.get(scheme)
    quantize = jax.jit(
        lambda x: qwix.quantize(
            x, qtype or element(scheme), channelwise_axes=each, tiled_axes=tiles
        )
    )
    x = jnp.asarray(host)
    return lambda: quantize(x)


# PyTorch, in the steps that torchao takes: one scale from amax, MX with the rules "floor" and
# "rceil" (its "even" is "floor" after one more addition), NVFP4 with two scales.


def torch_quantize(
    host: np.ndarray, scheme: str, rule: str | None = None, compiled: bool = False
) -> Call:
    import torch

    x = torch_tensor(host)
    if scheme in ("mxfp8_e4m3", "mxfp4"):
        function = partial(_torch_mx, largest=LARGEST[element(scheme)], rule=rule)
    elif scheme == "nvfp4":
        function = _torch_nvfp4
    else:
        function = partial(_torch_scaled, block=BLOCKS[scheme], integer=scheme.startswith("int8"))
    if compiled:
        torch._dynamo.reset()  # or it would give up after a number of shapes
        function = torch.compile(function, dynamic=False)
    return lambda: function(x)


def _torch_blocks(x: Any, block: tuple[int | None, int | None]) -> Any:
    """The matrix with both axes split, (row block, row, column block, column)."""
    rows, columns = (length or n for length, n in zip(block, x.shape, strict=True))
    return x.reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns)


def _torch_scaled(x: Any, block: tuple[int | None, int | None], integer: bool) -> tuple[Any, Any]:
    import torch

    blocks = _torch_blocks(x, block)
    largest = LARGEST["int8"] if integer else LARGEST["float8_e4m3fn"]
    scale = blocks.abs().amax((1, 3), keepdim=True).float().clamp(min=1e-12) / largest
    scaled = blocks.float() / scale
    if integer:
        codes = scaled.round().clamp(-largest, largest).to(torch.int8)
    else:
        codes = scaled.clamp(-largest, largest).to(torch.float8_e4m3fn)
    return codes.reshape(x.shape), scale


def _torch_mx(x: Any, largest: float, rule: str | None) -> tuple[Any, Any]:
    import torch

    blocks = x.reshape(x.shape[0], -1, 32)
    amax = blocks.abs().amax(-1, keepdim=True).float()
    if rule == "rceil":
        bits = (amax * (1 / largest)).view(torch.int32)
        field, mantissa = bits >> 23, bits & 0x7FFFFF
        up = torch.where(field == 0, mantissa > 0x400000, mantissa != 0)
        exponent = field + up.to(torch.int32)
    else:
        exponent = (amax.view(torch.int32) >> 23) - (math.frexp(largest)[1] - 1)
        exponent = exponent.clamp(min=0)
    exponent = torch.where(amax.isfinite(), exponent, 255)
    # 2**-exponent from its bits; the subnormal one at the end.
    field = 254 - exponent
    reciprocal = torch.where(field == 0, 0x400000, field << 23).view(torch.float32)
    scaled = blocks.float() * reciprocal
    scale = exponent.to(torch.uint8)  # codes of E8M0: torch.compile does not know its dtype on CPU
    if largest == LARGEST["float4_e2m1fn"]:
        return _torch_packed_e2m1(scaled.reshape(x.shape)), scale
    codes = scaled.clamp(-largest, largest).to(torch.float8_e4m3fn)
    return codes.reshape(x.shape), scale


def _torch_nvfp4(x: Any) -> tuple[Any, Any, Any]:
    import torch

    tensor_scale = x.abs().amax().float() / (LARGEST["float8_e4m3fn"] * LARGEST["float4_e2m1fn"])
    blocks = x.float().reshape(x.shape[0], -1, 16)
    scale = blocks.abs().amax(-1, keepdim=True) / LARGEST["float4_e2m1fn"] / tensor_scale
    scale = scale.clamp(LEAST_SCALE, LARGEST["float8_e4m3fn"]).to(torch.float8_e4m3fn)
    scaled = blocks / (scale.float() * tensor_scale)
    return _torch_packed_e2m1(scaled.reshape(x.shape)), scale, tensor_scale


def _torch_packed_e2m1(x: Any) -> Any:
    """Codes of float32 numbers by their bits: saturated, subnormal and normal ones apart."""
    import torch

    bits = x.view(torch.int32)
    magnitude = x.abs()
    # Below 1, adding 2**22 leaves the halves in the last bits; the adder rounds to even.
    small = (magnitude + 2.0**22).view(torch.int32) - 0x4A800000
    steps = magnitude.view(torch.int32)
    odd = (steps >> 22) & 1
    normal = (steps - (126 << 23) + 0x1FFFFF + odd) >> 22
    code = torch.where(magnitude < 1, small, torch.where(magnitude >= 6, 7, normal))
    code = (code | ((bits >> 28) & 8)).to(torch.uint8)
    return code[:, ::2] | (code[:, 1::2] << 4)


# ml_dtypes and NumPy, on one core.


def numpy_quantize(host: np.ndarray, scheme: str) -> Call:
    def call() -> tuple[np.ndarray, ...]:
        rows, columns = (length or n for length, n in zip(BLOCKS[scheme], host.shape, strict=True))
        blocks = host.astype(np.float32).reshape(
            host.shape[0] // rows, rows, host.shape[1] // columns, columns
        )
        amax = np.abs(blocks).max((1, 3), keepdims=True)
        scale, effective, more = _numpy_scales(amax, scheme)
        limit = np.float32(LARGEST[element(scheme)])
        scaled = np.clip(blocks / effective, -limit, limit)
        if element(scheme) == "int8":
            scaled = np.rint(scaled)
        codes = scaled.astype(element(scheme)).reshape(host.shape)
        if element(scheme) == "float4_e2m1fn":
            nibbles = codes.view(np.uint8)
            codes = nibbles[:, ::2] | (nibbles[:, 1::2] << 4)
        return codes, scale, *more

    return call


def _numpy_scales(amax: np.ndarray, scheme: str) -> tuple[np.ndarray, np.ndarray, tuple[Any, ...]]:
    """Scales in their own format, the float32 to divide by, and the scale of the tensor if any."""
    limit = np.float32(LARGEST[element(scheme)])
    if scheme.startswith("mx"):
        mantissa, exponent = np.frexp(amax / limit)
        effective = np.ldexp(np.float32(1), exponent - (mantissa == 0.5))
        return effective.astype("float8_e8m0fnu"), effective, ()
    if scheme == "nvfp4":
        tensor_scale = amax.max() / (limit * np.float32(LARGEST["float8_e4m3fn"]))
        scale = np.clip(amax / limit / tensor_scale, LEAST_SCALE, LARGEST["float8_e4m3fn"])
        scale = scale.astype("float8_e4m3fn")
        return scale, scale.astype(np.float32) * tensor_scale, (tensor_scale,)
    scale = np.maximum(amax, np.float32(1e-12)) / limit
    return scale, scale, ()


# The rule that does what ours does: for mxfp4 that is "even", "floor" after one more addition.
SAME_RULE = {"mxfp8_e4m3": "rceil", "mxfp4": "floor"}


def _torch_peers(compiled: bool) -> dict[Peer, tuple[str, ...]]:
    rows = {}
    for rule in ("floor", "rceil", None):
        name = " ".join(filter(None, ("PyTorch as torchao", rule, compiled and "compiled")))
        make = partial(torch_quantize, rule=rule, compiled=compiled)
        has = tuple(scheme for scheme in BLOCKS if (scheme in SAME_RULE) == (rule is not None))
        if not compiled:
            rows[Peer(name, make, ("torch",), slow=True)] = has
            continue
        same = tuple(scheme for scheme in has if SAME_RULE.get(scheme) == rule)
        rows[Peer(name, make, ("torch",), promised=True)] = same
        rows[Peer(name, make, ("torch",))] = tuple(scheme for scheme in has if scheme not in same)
    return rows


def _peers() -> dict[Peer, tuple[str, ...]]:
    """The rows, and the schemes that each has. PyTorch is compiled, too, given a C++ compiler."""
    four_bits = tuple(scheme for scheme in BLOCKS if element(scheme) == "float4_e2m1fn")
    bytes_only = tuple(scheme for scheme in BLOCKS if scheme not in four_bits)
    rows = _torch_peers(compiled=False)
    if shutil.which(os.environ.get("CXX", "g++")):
        rows |= _torch_peers(compiled=True)
    rows[Peer("qwix.quantize", qwix_quantize, ("qwix",))] = bytes_only
    rows[Peer("qwix.quantize, 4 bits", qwix_quantize, ("qwix",), slow=True)] = four_bits
    rows[Peer("ml_dtypes, NumPy", numpy_quantize, ("ml_dtypes",), slow=True)] = tuple(BLOCKS)
    return rows


SCHEMES_OF = _peers()
