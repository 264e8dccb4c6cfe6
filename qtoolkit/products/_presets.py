"""Recipes by the names under which they are published, as data, and recipes as text.

Each describes the arithmetic of the three matmuls of a layer. Other choices of its source
(optimizer states, communication, layers in high precision) are not part of a recipe: `Rules` say
which layers a recipe is for.
"""

import difflib
from typing import TYPE_CHECKING, Any

from qtoolkit.casts import Projection
from qtoolkit.formats import (
    E2M1FN,
    E4M3FN,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    FLOAT32,
    INT4,
    INT8,
    BlockFormat,
    FloatFormat,
)
from qtoolkit.products._json import from_json, to_json
from qtoolkit.products._operand import Current, Delayed, Hadamard, Learned, Operand
from qtoolkit.products._recipe import Recipe

__all__ = [
    "deepseek_v3",
    "fnuz_amd",
    "fp8_lm",
    "from_json",
    "int4_lsq",
    "int8_qat",
    "mxfp8",
    "native_fp8",
    "native_fp8_current",
    "nvfp4",
    "te_current",
    "te_delayed_hybrid",
    "to_json",
    "token_scaled",
    "w4a16",
    "weight_only_e4m3",
]


if not TYPE_CHECKING:  # with `__getattr__`, type checkers would accept every misspelled name

    def __getattr__(name: str) -> Any:
        close = difflib.get_close_matches(name, __all__, n=3, cutoff=0.5)
        meant = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
        raise AttributeError(
            f"qtoolkit.recipes: no recipe {name!r}; {meant}Expected one of {', '.join(__all__)}"
        )


def _along(element: object) -> BlockFormat:
    """One scale for each vector that is summed: for a kernel, each output channel."""
    return BlockFormat(element=element, block=(None,))  # type: ignore[arg-type]


te_current = Recipe("e4m3fn", "e5m2")
"""E4M3 forward, E5M2 for gradients, one current scale for each tensor.

Neither causal nor independent of the batch: see `Recipe`.
Source: `Float8CurrentScaling` of Transformer Engine; arXiv:2209.05433. Deviations: none known.
"""

_DELAYED = Delayed(history=1024)
te_delayed_hybrid = Recipe(
    Operand(BlockFormat.tensor(E4M3FN), scaling=_DELAYED),
    Operand(BlockFormat.tensor(E5M2), scaling=_DELAYED),
)
"""The same with scales from the largest magnitude of the last 1,024 steps.

Source: `DelayedScaling` (HYBRID, amax_compute_algo "max", margin 0) of Transformer Engine.
Deviations: amaxes are rounded up to buckets of an eighth of a binade, so scales are up to 12.5 %
larger; the first step scales by its own amax instead of 1; a step with an infinity or a NaN does
not change the history.
"""


def _expecting(element: FloatFormat, amax: float) -> Operand:
    scaling = Delayed(history=16, power_of_two=True, initial=amax)
    return Operand(BlockFormat.tensor(element), scaling=scaling)


native_fp8 = Recipe(
    (_expecting(E4M3FN, 16.0), _expecting(E4M3FN, 1.0)),
    _expecting(E5M2, 1.0),
    arithmetic="native",
)
"""For speed on a GPU with FP8: E4M3 forward, E5M2 for cotangents, delayed scales, powers of two.

Real 8-bit operands, results in the model's dtype. Each operand is read once: its scale does not
depend on it, so its amax is taken while it is cast. Until a layer has a history, it assumes that
activations are below 16, weights and cotangents below 1 (larger ones saturate, in the first step).
See "Speed on a GPU" in the documentation for the shapes that gain, and `native_fp8_current` for
models without a training step.
Source: `DelayedScaling` of Transformer Engine, arXiv:2209.05433; powers of two: arXiv:2412.19437,
section 3.3. Deviations: those of `te_delayed_hybrid`, except for the first step; 16 steps.
"""

_CURRENT = Current(power_of_two=True)
native_fp8_current = Recipe(
    Operand(BlockFormat.tensor(E4M3FN), scaling=_CURRENT),
    Operand(BlockFormat.tensor(E5M2), scaling=_CURRENT),
    arithmetic="native",
)
"""`native_fp8` with scales from the arrays themselves: no state, one more read of each operand.

Source: `Float8CurrentScaling` of Transformer Engine with `force_pow_2_scales`. Deviations: none
known.
"""

_TOKEN = BlockFormat.token(E4M3FN)
token_scaled = Recipe(
    (_TOKEN, _along(E4M3FN)),
    dgrad=(_TOKEN, _along(E4M3FN)),
    wgrad=(_along(E4M3FN), _along(E4M3FN)),
)
"""E4M3 with a scale for each token (vector of features) and each output channel of a kernel.

Causal and independent of the batch: a scale depends only on its own vector. In a wrapped model this
is the vector of features, even if the model has transposed it, as in `q @ k.swapaxes(-1, -2)`.
Source: the recipe "rowwise" of torchao's float8 training; arXiv:2208.07339, section 2 (vector-wise
scales). Deviations: scales are not rounded to powers of two.
"""

mxfp8 = Recipe("mxfp8_e4m3")
"""MXFP8: E4M3 in blocks of 32 along the contracted axis, in all three matmuls.

Source: `MXFP8BlockScaling` of Transformer Engine; arXiv:2506.08027, whose scales are rounded up so
that nothing saturates. OCP MX v1.0 rounds them down. Deviations: none known. Not causal in
attention, where blocks of values join 32 tokens.
"""

_NVFP4_2D = BlockFormat(element=E2M1FN, block=(16, 16), scale=E4M3FN, tensor_scale=FLOAT32)
_STOCHASTIC = Projection("stochastic")
nvfp4 = Recipe(
    ("nvfp4", _NVFP4_2D),
    dgrad=(Operand("nvfp4", _STOCHASTIC), _NVFP4_2D),
    wgrad=(
        Operand("nvfp4", transform=Hadamard(16)),
        Operand("nvfp4", _STOCHASTIC, transform=Hadamard(16)),
    ),
)
"""NVFP4: E2M1 in blocks of 16, weights in blocks of 16 x 16, a second scale for the tensor.

Cotangents are rounded stochastically; the operands of wgrad go through a random Hadamard transform
in blocks of 16.
Source: arXiv:2509.25149; `NVFP4BlockScaling` of Transformer Engine. Deviations: the published
training keeps some of the last layers in high precision; for this use `Rules`. Not causal: its
second scale is one current scale for a tensor.
"""

deepseek_v3 = Recipe(
    ("deepseek_1x128", "deepseek_128x128"),
    dgrad=("deepseek_1x128", "deepseek_128x128"),
    wgrad=("deepseek_1x128", "deepseek_1x128"),
)
"""E4M3 everywhere: activations and cotangents in tiles of 1 x 128, weights in blocks of 128 x 128.

Source: arXiv:2412.19437, section 3.3. Deviations: sums are float32 throughout; the paper keeps
embeddings, heads, gates, norms and attention in high precision; for this use `Rules`. Not causal in
attention, where blocks of values join 128 tokens. As in its kernels, an amax below 1e-4 counts as
1e-4: numbers below 2.2e-10 become 0, those of cotangents too. Scale the loss where they are small.
"""

fp8_lm = Recipe(
    Operand(BlockFormat.tensor(E4M3FN), scaling=Delayed(history=16)),
    Operand(BlockFormat.tensor(E5M2), scaling=Delayed(history=16)),
)
"""E4M3 forward, E5M2 for cotangents, per tensor, from the last 16 steps.

Source: arXiv:2310.18313. Deviations: the matmuls only; its FP8 communication, gradients and
optimizer states are not emulated, and the history of 16 is our choice.
"""

fnuz_amd = Recipe(BlockFormat.tensor(E4M3FNUZ), BlockFormat.tensor(E5M2FNUZ))
"""The FNUZ formats of AMD's MI300, one current scale for each tensor.

Source: arXiv:2206.02915 (the formats). Deviations: none known.
"""

int8_qat = Recipe((BlockFormat.tensor(INT8), _along(INT8)), gradient=None)
"""int8 activations with one scale, int8 weights with a scale for each output channel.

Cotangents are not quantized: gradients are those of a matmul of the rounded numbers
(straight-through).

Source: arXiv:1712.05877; arXiv:2103.13630, section III. Deviations: activations are scaled by their
current amax, without zero points or moving averages.
"""

_LSQ = Operand(BlockFormat.tensor(INT4), scaling=Learned())
int4_lsq = Recipe((_LSQ, _LSQ), gradient=None)
"""LSQ: int4 activations and weights, one learned scale for each; cotangents are not quantized.

The scales are parameters of a model from `qtoolkit.nnx.wrap`, or a separate collection of a
linen module, and `start_scales` gives them their first values.
Source: arXiv:1902.08153. Deviations: the paper has unsigned integers for activations that follow a
ReLU, and keeps the first and the last layer at 8 bits, for which use `Rules`.
"""

w4a16 = Recipe((None, "int4_group128"), gradient=None)
"""int4 weights in groups of 128 along the contracted axis; nothing else is quantized.

Source: arXiv:2210.17323 and arXiv:2306.00978 (the storage, not their search). Deviations: groups
are rounded to nearest, symmetric.
"""

weight_only_e4m3 = Recipe((None, _along(E4M3FN)), gradient=None)
"""E4M3 weights with a scale for each output channel; activations and cotangents are not quantized.

Source: the scheme of FP8 weight-only inference (compressed-tensors "channel"). Deviations: none
known.
"""
