"""Weights in OCP's microscaling formats, as several layouts hold them.

The scale of 32 neighbours of a row is a byte b, which stands for 2**(b - 127) whether the file
calls its dtype F8_E8M0 or U8. MXFP8 has a code to a byte. MXFP4 has two to a byte, the first one
low, whether the file calls these bytes U8 or I8.
"""

from qtoolkit.checkpoints.layouts._encoding import NIBBLES, Encoding
from qtoolkit.checkpoints.layouts._layout import Headers, decode_groups
from qtoolkit.formats import MXFP4, MXFP8_E4M3, MXFP8_E5M2

_MXFP8 = {"F8_E4M3": MXFP8_E4M3, "F8_E5M2": MXFP8_E5M2}


def microscaled(headers: Headers, name: str, scale_name: str, where: str) -> Encoding | None:
    """How the weight `name` is stored; None where dtypes and shapes are not those of microscaling.

    Args:
      headers: All entries; both names are among them.
    """
    codes, scale = headers[name], headers[scale_name]
    if scale.dtype not in ("U8", "F8_E8M0") or not codes.shape:
        return None
    *rows, columns = codes.shape
    if codes.dtype in _MXFP8 and scale.shape == (*rows, -(-columns // 32)):
        return decode_groups(name, codes.shape, _MXFP8[codes.dtype], codes, scale, where)
    if codes.dtype in ("I8", "U8") and scale.shape == (*rows, -(-columns // 16)):
        shape = (*rows, 2 * columns)
        return decode_groups(name, shape, MXFP4, codes, scale, where, packing=NIBBLES)
    return None
