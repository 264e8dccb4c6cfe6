"""Keywords that public functions do not have: which of theirs is meant."""

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

_BY_CHANNEL = (
    "axes are a part of the format: quantize(x, qtoolkit.BlockFormat.channel('int8', axis=0))"
)
_BY_BLOCK = "blocks are a part of the format: qtoolkit.BlockFormat(element='int4', block=(128,))"
_ROUNDING = "write rounding='toward_zero', say"
_SATURATION = "write saturation='finite', 'propagate' or 'none'"
_OF_SCALES = ("scale", "zero_point", "tensor_scale")
# What other libraries call these arguments.
_MEANT = {
    **dict.fromkeys(("axis", "axes", "ch_axis", "channel_axis", "quant_axis"), _BY_CHANNEL),
    **dict.fromkeys(("block", "block_size", "group_size", "blocksize"), _BY_BLOCK),
    **dict.fromkeys(("round_mode", "rounding_mode", "round", "mode"), _ROUNDING),
    "stochastic": "write rounding='stochastic', key=jax.random.key(0)",
    **dict.fromkeys(("saturate", "sat", "satmode", "clip", "overflow"), _SATURATION),
    **dict.fromkeys(("seed", "rng", "rngs", "prng_key"), "write key=jax.random.key(0)"),
    **dict.fromkeys(("scales", "s", "scale"), "write scale=..."),
    **dict.fromkeys(("zero_points", "zp", "offset", "zero_point"), "write zero_point=..."),
    **dict.fromkeys(
        ("global_scale", "per_tensor_scale", "scale_2"), "write tensor_scale=..."
    ),
    **dict.fromkeys(("estimator", "ste", "grad"), "write gradient='identity', say"),
    "amax": "write scale=amax / float(qtoolkit.format(fmt).max_finite)",
    **dict.fromkeys(("dtype", "format", "to", "qtype"), "the format is the second argument"),
}  # fmt: skip


def hinting(function: Function) -> Function:
    """Let `function` say of a keyword that it does not have which one is meant."""
    parameters = inspect.signature(function).parameters

    @functools.wraps(function)
    def wrapper(*args: Any, **keywords: Any) -> Any:
        try:  # looking at the keywords first would take a tenth of the time of an eager cast
            return function(*args, **keywords)
        except TypeError:
            unknown = [name for name in keywords if name not in parameters]
            if not unknown:
                raise
        name = unknown[0]
        raise TypeError(f"{function.__name__}: no argument {name!r}; {_hint(name)}")

    def _hint(name: str) -> str:
        hint = _MEANT.get(name, "")
        named = hint.removeprefix("write ").partition("=")[0]
        if hint.startswith("write ") and named not in parameters:
            hint = f"qtoolkit.quantize has {named!r}" if named in _OF_SCALES else ""
        close = difflib.get_close_matches(name, parameters, n=1)
        if close and not hint:
            hint = f"did you mean {close[0]!r}?"
        return hint or f"expected some of {', '.join(parameters)}"

    return wrapper  # type: ignore[return-value]
