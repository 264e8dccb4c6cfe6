"""Float16 and NaNs as GPUs and TPUs compute them, run here: XLA's CPU takes another version."""

import jax.numpy as jnp
import numpy as np
from casts_oracle import assert_same_bits
from test_bits import numbers_and_halves

from qtoolkit.casts._floats import _float16_and_nans_by_hand


def test_float16_values_keep_the_sign_of_nans():
    x, half = numbers_and_halves()
    values = _float16_and_nans_by_hand(jnp.asarray(x.view(np.uint32)))
    assert_same_bits(np.asarray(values).view(np.float32), half.view(np.float16).astype(np.float32))
