"""The metrics of an array in one format, or of several as a table."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import overload

import jax
import numpy as np
from jax.typing import ArrayLike

from qtoolkit import formats
from qtoolkit.casts import Stochastic
from qtoolkit.casts.internal import hinting, serializable
from qtoolkit.formats import SpecLike
from qtoolkit.scaling._metrics import Metrics, cells_of, metrics_of


@serializable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MetricsTable(Mapping[str, Metrics]):
    """The metrics of one array in several formats: a mapping from their names, a pytree.

    Attributes:
      names: Of the formats: as you spelled them, for objects `qt.spec(...).name`.
      rows: `Metrics` in the same order.

    Examples:
      >>> x = jax.random.normal(jax.random.key(0), (64, 64))
      >>> table = qt.metrics(x, ["int8", "e4m3fn", "nvfp4"])
      >>> table
              SQNR      max error  cosine    saturated  underflowed  not finite  codes used
      int8    41.06 dB  0.01542    0.999961  0 %        1.17 %       0           196 of 256
      e4m3fn  31.54 dB  0.1399     0.999649  0 %        0 %          0           152 of 256
      nvfp4   20.43 dB  0.4582     0.995464  0 %        7.15 %       0           16 of 16
      >>> max(table, key=lambda name: table[name].cosine)
      'int8'
    """

    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    rows: tuple[Metrics, ...]

    def __getitem__(self, name: str) -> Metrics:
        if name not in self.names:
            raise KeyError(f"MetricsTable: no row {name!r}, expected one of {list(self.names)}")
        return self.rows[self.names.index(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def to_dict(self) -> dict[str, dict[str, float]]:
        """Numbers of Python by format and field, without the histograms: rows for pandas."""
        fields = [f.name for f in dataclasses.fields(Metrics) if f.name != "histogram"]
        return {
            name: {field: np.asarray(getattr(row, field)).item() for field in fields}
            for name, row in self.items()
        }

    def __repr__(self) -> str:
        if any(isinstance(leaf, jax.core.Tracer) or np.ndim(leaf.sqnr_db) for leaf in self.rows):
            return f"MetricsTable({dict(self)!r})"
        cells = [cells_of(row) for row in self.rows]
        lines = [("", *cells[0]), *((n, *c.values()) for n, c in zip(self, cells, strict=True))]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )


@overload
def metrics(  # type: ignore[overload-overlap]  # a string is a sequence of strings
    x: ArrayLike,
    spec: SpecLike,
    *,
    scale: ArrayLike | None = ...,
    tensor_scale: ArrayLike | None = ...,
    zero_point: ArrayLike | None = ...,
    rounding: str | Stochastic = ...,
    saturation: str = ...,
    key: jax.Array | None = ...,
    random_bits: ArrayLike | None = ...,
    index_offset: ArrayLike = ...,
) -> Metrics: ...


@overload
def metrics(
    x: ArrayLike,
    spec: Sequence[SpecLike],
    *,
    scale: ArrayLike | None = ...,
    tensor_scale: ArrayLike | None = ...,
    zero_point: ArrayLike | None = ...,
    rounding: str | Stochastic = ...,
    saturation: str = ...,
    key: jax.Array | None = ...,
    random_bits: ArrayLike | None = ...,
    index_offset: ArrayLike = ...,
) -> MetricsTable: ...


@hinting
def metrics(
    x: ArrayLike,
    spec: SpecLike | Sequence[SpecLike],
    *,
    scale: ArrayLike | None = None,
    tensor_scale: ArrayLike | None = None,
    zero_point: ArrayLike | None = None,
    rounding: str | Stochastic = "nearest_even",
    saturation: str = "finite",
    key: jax.Array | None = None,
    random_bits: ArrayLike | None = None,
    index_offset: ArrayLike = 0,
) -> Metrics | MetricsTable:
    """Quantize `x` and measure the error.

    y is the float32 value of `quantize(x, spec, ...)`, before any rounding to the dtype of `x`.
    Sums are compensated: right to 1e-6 of their value for up to 2**32 elements of any magnitudes,
    SQNR to 1e-4 dB; in arrays that reach 2**60, errors below 2**-126 count as 0. Counts are exact.

    Args:
      x, spec, scale, tensor_scale, zero_point, rounding, saturation, key, random_bits,
        index_offset: As in `quantize`. A list of specs makes a table, with the scales of `x`.

    Returns:
      `Metrics`: SQNR, largest error, cosine, fractions that saturated and became zero, how many
      elements are not finite, and the histogram of codes. For a list a `MetricsTable` of these.

    Raises:
      TypeError, ValueError: As `quantize`; scales are given for several specs, or none or the same
        twice is among them.

    Gradient: zero. Under `vmap`, one set of metrics for each array.

    Examples:
      >>> x = jnp.asarray([0.0005, 0.5, 3.0, 900.0])
      >>> for scale in (1.0, None):  # given, where 900 saturates; from x
      ...     m = qt.metrics(x, "e4m3fn", scale=scale)
      ...     print(f"{m.sqnr_db:.1f} dB, saturated {m.saturated}, to zero {m.flushed}")
      6.0 dB, saturated 0.25, to zero 0.25
      96.4 dB, saturated 0.0, to zero 0.25
    """
    scales = {"scale": scale, "tensor_scale": tensor_scale, "zero_point": zero_point}
    keywords = {
        "rounding": rounding,
        "saturation": saturation,
        "key": key,
        "random_bits": random_bits,
        "index_offset": index_offset,
    }
    if not isinstance(spec, list | tuple):
        return metrics_of(x, spec, scales, keywords)  # type: ignore[arg-type]  # no sequence
    for name, value in scales.items():
        if value is not None:
            raise ValueError(
                f"metrics: {name} is given for several specs, expected one spec with it; call "
                "metrics once for each"
            )
    names = tuple(one if isinstance(one, str) else formats.spec(one).name for one in spec)
    if not names or len(set(names)) < len(names):
        raise ValueError(f"metrics: specs {list(names)}, expected one or more, each once")
    return MetricsTable(names, tuple(metrics_of(x, one, scales, keywords) for one in spec))
