"""Programs are compiled for a GPU that is described, not there: `make cuda` runs these tests."""

import os

# Before JAX is imported. The plugin for CUDA looks for a driver and for cuDNN otherwise.
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu,cuda"
