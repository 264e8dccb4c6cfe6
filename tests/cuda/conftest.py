"""Programs are compiled for a GPU that is described, not there: `make cuda` runs these tests."""

import os

import jax

jax.config.update("jax_platforms", "cpu,cuda")
# Before the plugin for CUDA starts: it looks for a driver and for cuDNN otherwise.
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
