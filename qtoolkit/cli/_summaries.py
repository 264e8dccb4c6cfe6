"""What `qtoolkit convert` says of a conversion, and of a plan for one. No JAX here."""

import math
from collections.abc import Sequence
from pathlib import Path

from qtoolkit.checkpoints import Plan, Report
from qtoolkit.checkpoints.internal import shown

PLAN_HEADER = ("tensor", "dtype", "becomes", "scale", "bytes", "kept because")


def plan_rows(plan: Plan) -> list[list[str]]:
    """A row for every tensor of the source; bytes are those to be written for it."""
    sizes = {info.name: info.nbytes for info in plan.outputs}
    return [
        [
            shown(tensor.name),
            tensor.source.dtype,
            tensor.dtype,
            "" if tensor.scale_shape is None else dimensions(tensor.scale_shape),
            f"{sum(sizes[name] for name, _, _ in tensor.entries):,}",
            tensor.reason,
        ]
        for tensor in plan.tensors
    ]


def plan_summary(plan: Plan, dst: Path) -> list[str]:
    """The lines under the table of a plan."""
    formats = [tensor.format.name for tensor in plan.tensors if tensor.format is not None]
    names = ", ".join(dict.fromkeys(formats)) or "nothing"
    return [
        f"{dst}: {names}{_scaling(plan.scaling)}; a dry run, nothing was written",
        *_counts(
            [tensor.reason for tensor in plan.tensors if tensor.action == "keep"],
            len(formats),
            sum(tensor.source.nbytes for tensor in plan.tensors),
            sum(info.nbytes for info in plan.outputs),
        ),
    ]


def report_summary(report: Report) -> list[str]:
    """The lines that end a conversion."""
    lines = [
        f"{report.target}: {report.format}{_scaling(report.scaling)}",
        *_counts(
            [tensor.reason for tensor in report.kept],
            len(report.quantized),
            report.bytes_before,
            report.bytes_after,
        ),
    ]
    if report.mean_sqnr_db is not None:
        worst = min(
            (tensor for tensor in report.quantized if tensor.sqnr_db is not None),
            key=lambda tensor: tensor.sqnr_db or 0.0,
        )
        lines.append(f"  mean SQNR  {_decibels(report.mean_sqnr_db)}")
        lines.append(f"  lowest     {_decibels(worst.sqnr_db or 0.0)}, {shown(worst.name)}")
    if report.nonfinite:
        lines.append(f"  note       {report.nonfinite:,} elements were NaN or infinite")
    return lines


def _scaling(scaling: str) -> str:
    return "" if scaling == "none" else f", a scale per {scaling}"


def _counts(reasons: Sequence[str], quantized: int, before: int, after: int) -> list[str]:
    """How many tensors and bytes; `reasons` has one for each tensor that is kept."""
    counted = ", ".join(f"{reason}: {reasons.count(reason)}" for reason in dict.fromkeys(reasons))
    share = 100 * after / max(before, 1)
    return [
        f"  quantized  {tensor_count(quantized)}",
        f"  kept       {tensor_count(len(reasons))}" + (f" ({counted})" if counted else ""),
        f"  bytes      {before:,} -> {after:,} ({share:.1f} %)",
    ]


def tensor_count(count: int) -> str:
    """1 tensor, 2,000 tensors."""
    return f"{count:,} tensor{'' if count == 1 else 's'}"


def dimensions(shape: tuple[int, ...]) -> str:
    """A shape as it is printed: [32, 16], [] for a scalar."""
    return f"[{', '.join(map(str, shape))}]"


def _decibels(value: float) -> str:
    return f"{value:.2f} dB" if math.isfinite(value) else "exact"
