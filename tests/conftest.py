"""What every test shares."""

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
