"""Optimizers in few bits: optax transforms for states and for weights."""

from qtoolkit._names import hint_at_names
from qtoolkit.optim._moments import SecondMoment
from qtoolkit.optim._quantize_state import QuantizedState, quantize_state
from qtoolkit.optim._weights import (
    MasterWeightsState,
    StochasticRoundState,
    master_weights,
    stochastic_round_updates,
)

__all__ = [
    "MasterWeightsState",
    "QuantizedState",
    "SecondMoment",
    "StochasticRoundState",
    "master_weights",
    "quantize_state",
    "stochastic_round_updates",
]

hint_at_names(__name__)
