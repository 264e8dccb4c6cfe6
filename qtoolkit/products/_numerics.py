"""What rounding does to every operand of a model's matmuls, forward and backward."""

import collections
import dataclasses
import functools
import json
import math
import operator
import os
from typing import Any

import jax
import numpy as np

from qtoolkit.casts.internal import serializable
from qtoolkit.products._place import MODEL, Place
from qtoolkit.products._report import Product, text_table
from qtoolkit.scaling.internal import (
    LOWEST_EXPONENT,
    TALLY_SHAPES,
    Tally,
)

HEADER = (
    *("layer", "matmul", "operand", "of", "format", "amax", "scale", "SQNR dB", "saturated %"),
    *("underflow %", "cosine"),
)
_VERSION = 1
_STATIC: Any = {"static": True}


@serializable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """One operand of one matmul of a layer.

    Attributes:
      path: The path of the layer, "blocks/0/mlp"; empty for the model itself.
      product: The name of the matmul in the layer. It stands for three matmuls: forward, dgrad and
        wgrad.
      operand: "lhs", "rhs" or "cotangent".
      parts: Which of the three round the operand to this format: "forward" or "forward, wgrad".
      fmt: The format to which it is rounded, as text; "unquantized" if it is not rounded, "e4m3fn
        by tensor, stored" for a kernel that is stored as codes.
      limits: The smallest positive and the largest value of the format; None if it is not rounded.
      tally: The measurements.
    """

    path: str = dataclasses.field(metadata=_STATIC)
    product: str = dataclasses.field(metadata=_STATIC)
    operand: str = dataclasses.field(metadata=_STATIC)
    parts: str = dataclasses.field(metadata=_STATIC)
    fmt: str = dataclasses.field(metadata=_STATIC)
    limits: tuple[float, float] | None = dataclasses.field(metadata=_STATIC)
    tally: Tally

    @property
    def key(self) -> tuple[str, ...]:
        """Identifies the operand: equal in the reports of two steps."""
        return tuple(getattr(self, name) for name in _ROW_FIELDS)

    @property
    def histogram(self) -> dict[int, float]:
        """How many elements lie between two powers of two: {-3: n} for 2**-3 <= |x| < 2**-2.

        Zeros are not counted.
        """
        counts = np.asarray(self.tally.exponents)[1:]
        return {LOWEST_EXPONENT + int(i): float(counts[i]) for i in np.nonzero(counts)[0]}

    def scalars(self) -> dict[str, float]:
        """The measurements by name; see `Numerics.scalars`."""
        tally = self.tally
        if not float(tally.uses):  # nothing was measured
            return {}
        scales = {"least_scale": tally.least_scale, "largest_scale": tally.largest_scale}
        return {
            "sqnr_db": tally.sqnr_db,
            "saturated": tally.saturated_fraction,
            "underflowed": tally.flushed_fraction,
            "amax": float(tally.amax),
            **({n: float(s) for n, s in scales.items()} if float(tally.largest_scale) else {}),
            "cosine": tally.cosine,
            "nonfinite": float(tally.nonfinite),
        }

    def cells(self) -> tuple[str, ...]:
        """As text, under `HEADER`."""
        names = (self.path or MODEL, self.product, self.operand, self.parts, self.fmt)
        tally = self.tally
        if not float(tally.uses):  # nothing was measured
            return (*names, *("-",) * 6)
        scale = "-"
        if float(tally.largest_scale):  # 0: the operand has no scale
            ends = (f"{float(end):.3g}" for end in (tally.least_scale, tally.largest_scale))
            scale = " .. ".join(dict.fromkeys(ends))
        return (
            *names,
            f"{float(tally.amax):.4g}",
            scale,
            f"{tally.sqnr_db:.2f}",
            f"{100 * tally.saturated_fraction:.3g}",
            f"{100 * tally.flushed_fraction:.3g}",
            f"{tally.cosine:.6f}",
        )


@serializable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Numerics:
    """What rounding did to the operands of a model's matmuls in one or more steps. A pytree.

        print(a + b)  # of two steps, or of two devices' batches

    The numbers are those that `qtoolkit.metrics` would return for the operand, if it used the
    scales of the step. A layer may run several times in a step: in a scan, under vmap, or because
    it is shared. Then one row describes all runs: sums and counts add up, amax is the largest of
    all runs, and scales are the smallest and the largest. These extremes are exact for a single
    run. For several runs, amax may be reported up to 12.5 % too large, and the range of scales too
    wide by up to a factor of 2 at each end. Kernels that are stored as codes are not rounded in the
    step: their rows show "stored" and no numbers.

    Attributes:
      rows: The operands, in the order in which the matmuls run.
      left: The forward matmuls that are not quantized.
    """

    rows: tuple[Row, ...]
    left: tuple[Product, ...] = dataclasses.field(default=(), metadata=_STATIC)

    def __add__(self, other: "Numerics") -> "Numerics":
        """Joins two reports: rows of the same operand are added, others appended."""
        if not isinstance(other, Numerics):
            return NotImplemented
        rows = {row.key: row for row in self.rows}
        for row in other.rows:
            mine = rows.get(row.key)
            total = row.tally if mine is None else mine.tally + row.tally
            rows[row.key] = dataclasses.replace(row, tally=total)
        left = tuple(dict.fromkeys((*self.left, *other.left)))
        return Numerics(rows=tuple(rows.values()), left=left)

    def __radd__(self, other: Any) -> "Numerics":
        """`sum(reports)` starts with 0."""
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def merge(self, *others: "Numerics") -> "Numerics":
        """The sum of all."""
        return functools.reduce(operator.add, others, self)

    def merge_across(self, axis_name: str | tuple[str, ...]) -> "Numerics":
        """The sum over all devices along axes of `jax.shard_map`, the same on each."""
        rows = (dataclasses.replace(r, tally=r.tally.merge_across(axis_name)) for r in self.rows)
        return dataclasses.replace(self, rows=tuple(rows))

    @property
    def unreached(self) -> tuple[str, ...]:
        """Matmuls that ran but were not measured, since the loss does not depend on them."""
        uses: dict[Place, float] = {}
        for row in self.rows:
            place = Place(row.path, row.product)
            uses[place] = max(uses.get(place, 0.0), float(row.tally.uses))
        return tuple(str(place) for place, count in uses.items() if not count)

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings below the rows: non-finite elements, matmuls not measured or not quantized."""
        notes = []
        broken = [row for row in self.rows if float(row.tally.nonfinite)]
        if broken:
            count = sum(float(row.tally.nonfinite) for row in broken)
            where = f"{Place(broken[0].path, broken[0].product)} {broken[0].operand}"
            notes.append(
                f"{count:.0f} elements are NaN or infinite, in {len(broken)} operands, the first "
                f"is {where}; the other numbers do not count them, except saturated infinities"
            )
        if self.unreached:
            names = ", ".join(self.unreached)
            notes.append(f"not measured, because the loss does not depend on them: {names}")
        if self.left:
            count = sum(product.count for product in self.left)
            first = self.left[0]
            what = f"{first.operands} ({first.reason}{first.where and ', ' + first.where})"
            notes.append(f"{count} forward matmuls are not quantized, the first is {what}")
        return tuple(notes)

    def scalars(self) -> dict[str, float]:
        """For a logger, by "matmul/operand/number": what `str` shows of each operand, as numbers.

        The numbers are sqnr_db, saturated, underflowed (shares), amax, least_scale, largest_scale,
        cosine and nonfinite (a count). An operand that was not measured has none, one without
        scales no scales. An operand with several formats has a name for each: "lhs (wgrad)".
        """
        seen = collections.Counter((row.path, row.product, row.operand) for row in self.rows)
        scalars: dict[str, float] = {}
        for row in self.rows:
            alone = seen[row.path, row.product, row.operand] == 1
            operand = row.operand if alone else f"{row.operand} ({row.parts})"
            place = Place(row.path, row.product)
            scalars |= {f"{place}/{operand}/{n}": value for n, value in row.scalars().items()}
        return scalars

    def __str__(self) -> str:
        return "\n".join([*text_table([HEADER, *(r.cells() for r in self.rows)]), *self.notes])

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Writes a PNG: SQNR, and the shares of elements that saturate and that become zero.

        A row for each matmul, a column for each operand.

        Raises:
          ImportError: matplotlib is missing; pip install matplotlib.
          OSError: The file cannot be written.
        """
        from qtoolkit.plots.internal import numerics_map

        numerics_map(self, path)

    def to_json(self) -> str:
        """The report as JSON. `Numerics.from_json` makes an equal report from it."""
        data = {"type": "Numerics", "version": _VERSION, **dataclasses.asdict(self)}
        return json.dumps(data, default=_as_json)

    @classmethod
    def from_json(cls, text: str | bytes) -> "Numerics":
        """Read a report that `to_json` wrote.

        Raises:
          ValueError: The text is something else; the message says what is missing.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            message = f"Numerics: invalid JSON ({error}), expected that of to_json"
            raise ValueError(message) from error
        if not isinstance(data, dict) or data.get("type") != "Numerics":
            raise ValueError("Numerics: the text is no report of numerics, expected to_json's")
        if data.get("version") != _VERSION:
            raise ValueError(
                f"Numerics: version {data.get('version')!r}, expected {_VERSION}; it is of another "
                "version of qtoolkit"
            )
        try:
            rows = tuple(map(_row_from, data["rows"]))
            return cls(rows=rows, left=tuple(Product(**product) for product in data["left"]))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"Numerics: damaged text: {type(error).__name__}: {error}") from error


_ROW_FIELDS = ("path", "product", "operand", "parts", "fmt")


def _as_json(x: Any) -> Any:
    # JSON has no infinity, so null stands for it: for the least scale of an operand without scales.
    array = np.asarray(x)
    if array.ndim:
        return array.tolist()
    return float(array) if math.isfinite(float(array)) else None


def _row_from(data: dict[str, Any]) -> Row:
    tally = data["tally"]
    arrays: dict[str, Any] = {
        field.name: np.asarray(
            np.inf if tally[field.name] is None else tally[field.name], np.float32
        )
        for field in dataclasses.fields(Tally)
    }
    for name, expected in TALLY_SHAPES.items():
        if arrays[name].shape != expected:
            raise ValueError(f"{name} of shape {arrays[name].shape}, expected {expected}")
    limits = data["limits"]
    strings = {name: str(data[name]) for name in _ROW_FIELDS}
    return Row(
        **strings, limits=None if limits is None else (limits[0], limits[1]), tally=Tally(**arrays)
    )
