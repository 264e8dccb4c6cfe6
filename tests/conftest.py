"""What every test shares."""

import os
import subprocess
import sys
from collections.abc import Callable

import jax
import pytest

LAYERS = ("formats", "casts", "scaling", "gradients", "products")
OPERATORS = ("onnx", "openvino", "pypto")


@pytest.fixture(autouse=True)
def _strict_promotion(request):
    """No implicit dtype promotion in the layers that are ours alone; Flax and optax promote."""
    layer = request.path.relative_to(request.config.rootpath / "tests").parts[0]
    mode = "strict" if layer in LAYERS + OPERATORS else "standard"
    with jax.numpy_dtype_promotion(mode):
        yield


@pytest.fixture
def on_devices() -> Callable[..., subprocess.CompletedProcess]:
    """Runs a script on so many CPU devices, which are counted when JAX starts; warnings raise."""

    def run(count: int, script: str, *arguments: str) -> subprocess.CompletedProcess:
        environment = os.environ | {
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}",
            "JAX_PLATFORMS": "cpu",
        }
        command = [sys.executable, "-W", "error", "-c", script, *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    return run
