"""`input_scales`: the scales by which a wrapped model divides the inputs of its matmuls."""

from flax import nnx

from qtoolkit.nnx._report import check_module
from qtoolkit.nnx._state import product_states
from qtoolkit.products.internal import input_scale


def input_scales(model: nnx.Module) -> dict[str, float]:
    """The static scales of activations that an engine needs: those that training used.

    Args:
      model: A model from `wrap` with delayed or calibrated scales of activations, or what
        `quantize` makes of it.

    Returns:
      A scale for each matmul whose input has one that the model keeps, by the name of its
      parameter: {"layers.0.kernel": 0.5}. `qtoolkit.checkpoints.export` and
      `convert` take it as `input_scales`. Of formats with a second scale, such as NVFP4, it is the
      tensor scale. A matmul that has seen no step yet has none.

    Raises:
      TypeError: `model` is no `nnx.Module`.

    Examples:
      >>> wrapped = qt.nnx.wrap(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), qt.recipes.te_delayed_hybrid)
      >>> loss = qt.nnx.value_and_grad(lambda model, x: model(x).sum())
      >>> value, gradient = loss(wrapped, jnp.full((1, 4), 896.0))
      >>> qt.nnx.input_scales(wrapped)  # 896 / 448, from a history that is known to 12.5 %
      {'kernel': 2.142857074737549}
    """
    check_module("input_scales", model)
    found: dict[str, float] = {}
    for path, module in nnx.iter_modules(model):
        for name, product in product_states(module).items():
            scale = input_scale(product.recipe, name, product.arrays)
            if scale is not None:
                found[".".join(map(str, (*path, name)))] = scale
    return found
