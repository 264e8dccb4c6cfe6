"""What native FP8 would gain on a GPU: an estimate from the shapes of matmuls, before compiling."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from qtoolkit.products._report import text_table


@dataclasses.dataclass(frozen=True)
class Gpu:
    """The rates by which `expected_gain` estimates.

    Attributes:
      name: Of the GPU.
      fp8, bfloat16: Floating-point operations a second that large matmuls reach, not the peaks of
        the data sheet.
      bandwidth: Bytes a second that elementwise kernels reach.
      launch: Seconds that a kernel costs in addition to its bytes.
      kernels: How many more kernels a layer's three matmuls have in FP8 than in bfloat16.

    Examples:
      >>> twice = qt.products.Gpu("twice an H100", fp8=2600e12, bfloat16=1400e12, bandwidth=6.6e12)
      >>> x = jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16)
      >>> w = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
      >>> gains = [qt.products.expected_gain(jnp.dot, x, w, **gpu) for gpu in ({}, {"gpu": twice})]
      >>> [f"{gain.factor:.2f}" for gain in gains]  # launches take as long as before
      ['1.48', '1.41']
    """

    name: str
    fp8: float
    bfloat16: float
    bandwidth: float
    launch: float = 3e-6
    kernels: int = 11


# A matmul of [8192, 4096] x [4096, 4096] with both gradients: 1.18 ms by these rates in bfloat16,
# 1.16 ms measured. The kernels are those of `native_fp8`, compiled.
H100 = Gpu("NVIDIA H100 SXM", fp8=1300e12, bfloat16=700e12, bandwidth=3.3e12)
_PASS = 5  # bytes for each element of an operand: read as bfloat16, codes written, read, turned


@dataclasses.dataclass(frozen=True)
class Matmul:
    """A matmul [m, k] x [k, n], `batch` of them at once, and its two gradients.

    Attributes:
      count: How often it runs, forward.
      plain, native: Estimated seconds of one, with gradients, in bfloat16 and in native FP8.
    """

    batch: int
    m: int
    k: int
    n: int
    count: int
    plain: float
    native: float


@dataclasses.dataclass(frozen=True)
class Gain:
    """Estimated times of a model's matmuls, with their gradients.

    Attributes:
      gpu: The GPU that is assumed.
      matmuls: Each shape once.

    Examples:
      >>> x = jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16)
      >>> w = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
      >>> print(qt.products.expected_gain(jnp.dot, x, w))
      matmul with gradients        runs  bfloat16 us  native FP8 us  times as fast
      [8192, 4096] x [4096, 4096]  1     1187         803            1.48
      all matmuls: 1.48 times as fast on an NVIDIA H100 SXM (estimated)
    """

    gpu: Gpu
    matmuls: tuple[Matmul, ...]

    @property
    def factor(self) -> float:
        """How many times as fast all matmuls are in native FP8 as in bfloat16."""
        plain, native = (
            sum(getattr(one, name) * one.count for one in self.matmuls)
            for name in ("plain", "native")
        )
        return plain / native if native else 1.0

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("matmul with gradients", "runs", "bfloat16 us", "native FP8 us", "times as fast")
        ]
        for one in self.matmuls:
            batch = f"{one.batch} x " if one.batch > 1 else ""
            rows.append(
                (
                    f"{batch}[{one.m}, {one.k}] x [{one.k}, {one.n}]",
                    str(one.count),
                    f"{one.plain * 1e6:.0f}",
                    f"{one.native * 1e6:.0f}",
                    f"{one.plain / one.native:.2f}",
                )
            )
        text = f"all matmuls: {self.factor:.2f} times as fast on an {self.gpu.name} (estimated)"
        return "\n".join([*text_table(rows), text])


def expected_gain(function: Callable[..., Any], *arguments: Any, gpu: Gpu = H100) -> Gain:
    """Estimates what `recipes.native_fp8` would gain for the matmuls of a model, from their shapes.

        print(qtoolkit.products.expected_gain(model, batch))

    Nothing is computed or compiled. A matmul takes as long as its operations or its bytes,
    whichever is longer; FP8 adds the passes that cast and transpose operands, and the launches of
    their kernels. Everything else that a step computes is not counted, so the step gains less.

    Args:
      function: A model or another function, called with `arguments`; wrapped or not.
      arguments: Arrays or `jax.ShapeDtypeStruct`.
      gpu: Rates of another GPU.

    Examples:
      >>> struct = jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16)
      >>> weight = jax.ShapeDtypeStruct((4096, 14336), jnp.bfloat16)
      >>> print(f"{qt.products.expected_gain(jnp.dot, struct, weight).factor:.1f}")
      1.6
      >>> small = jax.ShapeDtypeStruct((8192, 512), jnp.bfloat16)
      >>> weight = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
      >>> qt.products.expected_gain(jnp.dot, small, weight).factor < 1
      True
    """
    matmuls = []
    for shape, count in Counter(_shapes(jax.make_jaxpr(function)(*arguments))).items():
        batch, m, k, n = shape
        elements = batch * (m * k + k * n + m * n)
        operations = 3 * 2 * batch * m * k * n
        # Each of the three matmuls reads two of the arrays and writes the third in bfloat16.
        plain = max(operations / gpu.bfloat16, 6 * elements / gpu.bandwidth)
        native = max(operations / gpu.fp8, 4 * elements / gpu.bandwidth)
        plain += 3 * gpu.launch
        native += _PASS * elements / gpu.bandwidth + (3 + gpu.kernels) * gpu.launch
        matmuls.append(Matmul(*shape, count, plain, native))
    return Gain(gpu, tuple(matmuls))


def _shapes(closed: ClosedJaxpr | Any, times: int = 1) -> Iterator[tuple[int, int, int, int]]:
    """(batch, m, k, n) of every matmul, as often as it runs."""
    for eqn in getattr(closed, "jaxpr", closed).eqns:
        if eqn.primitive.name == "dot_general":
            (of_lhs, _), (batch_l, _) = eqn.params["dimension_numbers"]
            lhs, rhs = (x.aval.shape for x in eqn.invars[:2])
            batch, k = (math.prod(lhs[axis] for axis in axes) for axes in (batch_l, of_lhs))
            m, n = math.prod(lhs) // max(batch * k, 1), math.prod(rhs) // max(batch * k, 1)
            for _ in range(times):
                yield batch, m, k, n
        inner = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for value in eqn.params.values():
            for each in value if isinstance(value, tuple | list) else (value,):
                if hasattr(getattr(each, "jaxpr", each), "eqns"):
                    yield from _shapes(each, inner)
