"""Optimizers in few bits: optax transforms that quantize states, weights and steps."""

from qtoolkit.optim._moments import SecondMoment
from qtoolkit.optim._quantize_state import QuantizedState, quantize_state

__all__ = ["QuantizedState", "SecondMoment", "quantize_state"]
