"""Layers that are quantized from the start, for models that are written with them."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike

from qtoolkit.casts import Stochastic
from qtoolkit.casts.internal import check_rounding
from qtoolkit.formats import FormatLike, format
from qtoolkit.gradients import Estimator, fake_convert
from qtoolkit.nnx._wrap import quantize_alone
from qtoolkit.products import Recipe
from qtoolkit.products.internal import check_recipe

_DEFAULT = Recipe()


class Fp8Linear(nnx.Linear):
    """`nnx.Linear` whose matmul is by a recipe, as in a wrapped model.

    Under `jax.vmap` and `nnx.vmap` each example is scaled by itself, as in `qtoolkit.dot_general`.

    Args:
      recipe: What its matmuls round.
      args, kwargs: As for `nnx.Linear`. Parameters are the same, and are not quantized.

    Examples:
      >>> layer = qt.nnx.Fp8Linear(2, 1, rngs=nnx.Rngs(0), recipe=qt.recipes.te_current)
      >>> layer.kernel[...] = jnp.asarray([[448.0], [1.0]])
      >>> layer(jnp.asarray([[0.3, 448.0]]))  # 0.3 became 0.3125
      Array([[588.]], dtype=float32)
    """

    def __init__(self, *args: Any, recipe: Recipe = _DEFAULT, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        quantize_alone(self, check_recipe("Fp8Linear", recipe))


class Fp8Conv(nnx.Conv):
    """`nnx.Conv` by a recipe, as `Fp8Linear`: under `vmap` each example is scaled by itself.

    Examples:
      >>> layer = qt.nnx.Fp8Conv(1, 1, kernel_size=2, rngs=nnx.Rngs(0), recipe=qt.Recipe("mxfp8"))
      >>> layer(jnp.ones((1, 5, 1))).shape, layer.kernel.shape
      ((1, 5, 1), (2, 1, 1))
      >>> print(str(qt.nnx.report(layer, jnp.ones((1, 5, 1)))).splitlines()[-1])
      2 of 2 matmuls quantized
    """

    def __init__(self, *args: Any, recipe: Recipe = _DEFAULT, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        quantize_alone(self, check_recipe("Fp8Conv", recipe))


class Fp8Einsum(nnx.Einsum):
    """`nnx.Einsum` by a recipe, as `Fp8Linear`: under `vmap` each example is scaled by itself.

    Examples:
      >>> recipe = qt.recipes.te_current
      >>> layer = qt.nnx.Fp8Einsum("bi,io->bo", (2, 1), rngs=nnx.Rngs(0), recipe=recipe)
      >>> layer.kernel[...] = jnp.asarray([[448.0], [1.0]])
      >>> layer(jnp.asarray([[0.3, 448.0]]))  # 0.3 became 0.3125
      Array([[588.]], dtype=float32)
    """

    def __init__(self, *args: Any, recipe: Recipe = _DEFAULT, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        quantize_alone(self, check_recipe("Fp8Einsum", recipe))


class FakeConvert(nnx.Module):
    """`qtoolkit.fake_convert` as a layer: (conv(x * scale - shift) + shift) / scale.

    Its scale, and its shift where there is one, are parameters: they are trained with the model.

    Args:
      fmt: The format, as `fake_convert` takes it.
      scale: float32, one number or an array that broadcasts to the input.
      shift: The same, or None.
      rounding, saturation, gradient: As `fake_convert` takes them.
      rngs: Its stream "qtoolkit" gives stochastic rounding a key for each call.

    Raises:
      ValueError: No such format, rounding or saturation; stochastic rounding without `rngs`.

    Examples:
      >>> layer = qt.nnx.FakeConvert("e4m3fn", scale=2.0)
      >>> x = jnp.asarray([0.3, 500.0])
      >>> layer(x)  # 0.6 becomes 0.625 / 2, and 1000 becomes 448 / 2
      Array([  0.3125, 224.    ], dtype=float32)
      >>> grads = nnx.grad(lambda layer: layer(x).sum())(layer)
      >>> f"{grads['scale'].get_value():.2f}"  # the scale is a parameter
      '-112.01'
    """

    def __init__(
        self,
        fmt: FormatLike,
        scale: ArrayLike = 1.0,
        shift: ArrayLike | None = None,
        *,
        rounding: str | Stochastic = "nearest_even",
        saturation: str = "finite",
        gradient: str | Estimator = "clipped",
        rngs: nnx.Rngs | None = None,
    ) -> None:
        self.fmt = format(fmt)
        self.rounding = check_rounding("FakeConvert", rounding, saturation)
        self.saturation, self.gradient = saturation, gradient
        self.rngs = nnx.data(None)
        if isinstance(self.rounding, Stochastic):
            if rngs is None:
                raise ValueError(
                    "FakeConvert: stochastic rounding got no rngs, expected e.g. rngs=nnx.Rngs(0)"
                )
            self.rngs = rngs["qtoolkit"].fork()
        self.scale = nnx.Param(jnp.asarray(scale, jnp.float32))
        self.shift = nnx.data(None)
        if shift is not None:
            self.shift = nnx.Param(jnp.asarray(shift, jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        shift = None if self.shift is None else self.shift[...].astype(x.dtype)
        return fake_convert(
            x,
            self.scale[...].astype(x.dtype),
            shift,
            fmt=self.fmt,
            rounding=self.rounding,
            saturation=self.saturation,
            gradient=self.gradient,
            key=None if self.rngs is None else self.rngs(),
        )
