"""Static activation scales that the user gives to a conversion, one per module. No JAX here."""

import contextlib
import math
import numbers
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qtoolkit.checkpoints._report import TensorPlan
from qtoolkit.checkpoints._roles import module_of
from qtoolkit.checkpoints._tensors import CheckpointError, MisuseError, Tensor, shown
from qtoolkit.checkpoints.layouts import Layout, Scheme

InputScales = float | Mapping[str, float]


def input_scale(
    given: InputScales | None, info: Tensor, scheme: Scheme, layout: Layout
) -> float | None:
    """The activation scale of a tensor's module; None if its scheme has no activation scales.

    Raises:
      CheckpointError: The scheme needs a scale and none was given, or it is no number above 0.
    """
    if isinstance(given, Mapping):
        given = given.get(module_of(info.name), given.get(info.name))
    if given is None and scheme.needs_input_scale:
        raise CheckpointError(
            f"tensor {shown(info.name)}: {scheme.name} in layout {layout.name} has static "
            "activation scales, expected one for "
            f"{shown(module_of(info.name))}; give --input-scales FILE from a calibration, or "
            + _without_them(scheme, layout)
        )
    return None if given is None else _number(given, info)


def _number(given: Any, info: Tensor) -> float:
    """The number, as float32 has it: files hold that, in which 1e-50 is 0."""
    if not isinstance(given, bool) and isinstance(given, numbers.Real):
        with np.errstate(over="ignore", under="ignore"), contextlib.suppress(OverflowError):
            number = float(np.float32(float(given)))
            if 0 < number < math.inf:
                return number
    raise CheckpointError(
        f"tensor {shown(info.name)}: input scale {reprlib.repr(given)}, expected a number above 0 "
        "that float32 has; correct it in --input-scales"
    )


def _without_them(scheme: Scheme, layout: Layout) -> str:
    if scheme in layout.static.values():
        return "leave --input-scales out"
    if scheme.scaling is None:
        return "use --layout compressed-tensors, which needs none"
    return "use --scaling channel or --layout compressed-tensors, which need none"


def check_used(given: InputScales | None, tensors: Sequence[TensorPlan], layout: Layout) -> None:
    """Raises if input scales were given that nothing uses, or that name no module."""
    if given is None:
        return
    if not any(t.scheme is not None and t.scheme.needs_input_scale for t in tensors):
        raise MisuseError(
            f"--input-scales: nothing in layout {layout.name} with this format and "
            "scaling takes static activation scales, expected one that does; leave "
            "--input-scales out, or use --scaling tensor with --layout modelopt or "
            "compressed-tensors"
        )
    names = {name for info in tensors for name in (info.name, module_of(info.name))}
    unknown = [name for name in (given if isinstance(given, Mapping) else {}) if name not in names]
    if unknown:
        some = ", ".join(shown(module_of(t.name)) for t in tensors if t.scheme is not None)
        raise CheckpointError(
            f"--input-scales: {shown(unknown[0])} is no module of the checkpoint, expected "
            f"such as {some[:200]}; correct the name"
        )
