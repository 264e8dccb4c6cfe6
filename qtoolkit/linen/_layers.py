"""Flax layers that take a recipe as an attribute, for use in the code of a model."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from qtoolkit.casts import Stochastic
from qtoolkit.casts.internal import check_rounding
from qtoolkit.formats import FormatLike, Rules
from qtoolkit.gradients import Estimator, fake_convert
from qtoolkit.linen._call import entered
from qtoolkit.products import Recipe
from qtoolkit.products.internal import check_recipe

Initializer = Callable[..., jax.Array]


@nn.nowrap
def _own_recipe(layer: Any) -> Rules[Recipe]:
    return Rules((), default=check_recipe(type(layer).__name__, layer.recipe))


class Fp8Dense(nn.Dense):
    """`nn.Dense` whose matmul is quantized by `recipe`; its parameters are those of `nn.Dense`.

    It keeps this recipe even in a model that is wrapped with another one. `Delayed` scaling and
    stochastic rounding keep their state in the collection "qtoolkit", in the scope of the layer.
    Under `nn.scan` and `nn.vmap` that collection needs an axis: variable_axes={"qtoolkit": 0}.
    Under `jax.vmap` and `nn.vmap` each example is scaled by itself, as in `qtoolkit.dot_general`.

    Examples:
      >>> layer = qt.linen.Fp8Dense(1, use_bias=False, recipe=qt.recipes.te_current)
      >>> variables = {"params": {"kernel": jnp.asarray([[448.0], [1.0]])}}
      >>> layer.apply(variables, jnp.asarray([[0.3, 448.0]]))  # 0.3 became 0.3125
      Array([[588.]], dtype=float32)
    """

    recipe: Recipe = Recipe()
    qtoolkit_rules = property(_own_recipe)
    __call__ = entered(nn.Dense.__call__)


class Fp8Conv(nn.Conv):
    """`nn.Conv` whose convolution is quantized by `recipe`; see `Fp8Dense`.

    Under `vmap` each example is scaled by itself.

    Examples:
      >>> layer = qt.linen.Fp8Conv(1, kernel_size=(2,), recipe=qt.Recipe("mxfp8"))
      >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.ones((1, 5, 1)))
      >>> y.shape, variables["params"]["kernel"].shape
      ((1, 5, 1), (2, 1, 1))
    """

    recipe: Recipe = Recipe()
    qtoolkit_rules = property(_own_recipe)
    __call__ = entered(nn.Conv.__call__)


class Fp8Einsum(nn.Einsum):
    """`nn.Einsum` whose matmul is quantized by `recipe`; see `Fp8Dense`.

    Under `vmap` each example is scaled by itself.

    Examples:
      >>> recipe = qt.recipes.te_current
      >>> layer = qt.linen.Fp8Einsum((2, 1), "bi,io->bo", use_bias=False, recipe=recipe)
      >>> variables = {"params": {"kernel": jnp.asarray([[448.0], [1.0]])}}
      >>> layer.apply(variables, jnp.asarray([[0.3, 448.0]]))  # 0.3 became 0.3125
      Array([[588.]], dtype=float32)
    """

    recipe: Recipe = Recipe()
    qtoolkit_rules = property(_own_recipe)
    __call__ = entered(nn.Einsum.__call__)


class FakeConvert(nn.Module):
    """`qtoolkit.fake_convert` with a learned scale, and a learned shift if it is asked for.

    Attributes:
      fmt: The format, as `fake_convert` takes it.
      shape: The shape of scale and shift; it must broadcast to the input.
      use_shift: Whether there is a shift.
      scale_init, shift_init: Initializers of (key, shape, dtype).
      param_dtype: The dtype of scale and shift.
      rounding, saturation, gradient: As `fake_convert` takes them. Stochastic rounding draws its
        key from the rng collection "qtoolkit".

    Examples:
      >>> layer = qt.linen.FakeConvert("e4m3fn", scale_init=nn.initializers.constant(2.0))
      >>> x = jnp.asarray([0.3, 500.0])
      >>> y, variables = layer.init_with_output(jax.random.key(0), x)
      >>> y, variables  # 0.6 becomes 0.625 / 2, and 1000 becomes 448 / 2
      (Array([  0.3125, 224.    ], dtype=float32), {'params': {'scale': Array(2., dtype=float32)}})
    """

    fmt: FormatLike
    shape: tuple[int, ...] = ()
    use_shift: bool = False
    scale_init: Initializer = nn.initializers.ones
    shift_init: Initializer = nn.initializers.zeros
    param_dtype: DTypeLike = jnp.float32
    rounding: str | Stochastic = "nearest_even"
    saturation: str = "finite"
    gradient: str | Estimator = "clipped"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(conv(x * scale - shift) + shift) / scale, shape and dtype of `x`."""
        scale = self.param("scale", self.scale_init, self.shape, self.param_dtype)
        shift = None
        if self.use_shift:
            shift = self.param("shift", self.shift_init, self.shape, self.param_dtype)
            shift = shift.astype(x.dtype)
        rounding = check_rounding("FakeConvert", self.rounding, self.saturation)
        return fake_convert(
            x,
            scale.astype(x.dtype),
            shift,
            fmt=self.fmt,
            rounding=rounding,
            saturation=self.saturation,
            gradient=self.gradient,
            key=self.make_rng("qtoolkit") if isinstance(rounding, Stochastic) else None,
        )
