"""The block formats that are published."""

from typing import Any

from qtoolkit.formats._block import BlockFormat
from qtoolkit.formats._format import BLOCKS
from qtoolkit.formats._names import (
    E2M1FN,
    E2M3FN,
    E3M2FN,
    E4M3FN,
    E5M2,
    E8M0FNU,
    FLOAT32,
    INT4,
    INT8,
    NF4,
    Format,
)


def _published(name: str, **fields: Any) -> BlockFormat:
    fmt = BlockFormat(**fields)
    BLOCKS[name] = fmt
    return fmt


def _mx(name: str, element: Format, **fields: Any) -> BlockFormat:
    """Source: OCP Microscaling Formats (MX) Specification v1.0; rules: see `BlockFormat`."""
    return _published(name, element=element, block=(32,), scale=E8M0FNU, **fields)


def _deepseek(block: tuple[int, int], **fields: Any) -> BlockFormat:
    """Source: arXiv:2412.19437, section 3.3; `amax_epsilon` is that of its published kernels."""
    name = f"deepseek_{block[0]}x{block[1]}{'_e8m0' if fields else ''}"
    return _published(name, element=E4M3FN, block=block, amax_epsilon=1e-4, **fields)


MXFP8_E4M3 = _mx("mxfp8_e4m3", E4M3FN)
MXFP8_E5M2 = _mx("mxfp8_e5m2", E5M2)
MXFP6_E2M3 = _mx("mxfp6_e2m3", E2M3FN)
MXFP6_E3M2 = _mx("mxfp6_e3m2", E3M2FN)
MXFP4 = _mx("mxfp4", E2M1FN)
MXINT8 = _mx("mxint8", INT8, element_exponent=-6, narrow_range=True)
# Source: arXiv:2509.25149; the scale is E4M3 without its sign, the second one float32.
NVFP4 = _published("nvfp4", element=E2M1FN, block=(16,), scale=E4M3FN, tensor_scale=FLOAT32)
DEEPSEEK_1X128, DEEPSEEK_128X128 = _deepseek((1, 128)), _deepseek((128, 128))
DEEPSEEK_1X128_E8M0 = _deepseek((1, 128), scale=E8M0FNU)
DEEPSEEK_128X128_E8M0 = _deepseek((128, 128), scale=E8M0FNU)
INT8_GROUP128 = _published("int8_group128", element=INT8, block=(128,))
INT4_GROUP32 = _published("int4_group32", element=INT4, block=(32,))
INT4_GROUP128 = _published("int4_group128", element=INT4, block=(128,))
NF4_BLOCK64 = _published("nf4_block64", element=NF4, block=(64,))  # arXiv:2305.14314

BLOCK_FORMATS: tuple[BlockFormat, ...] = tuple(BLOCKS.values())
