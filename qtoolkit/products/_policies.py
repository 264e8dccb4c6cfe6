"""Policies: which layers a recipe quantizes, from which step on, and what devices send for it."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

from qtoolkit.formats import Rules
from qtoolkit.formats.internal import plain_number
from qtoolkit.products._checks import check_recipe
from qtoolkit.products._operand import Operand
from qtoolkit.products._recipe import Recipe

__all__ = ["first_last_high_precision", "gather_codes", "join", "warm_up"]


@dataclasses.dataclass(frozen=True)
class FirstLast:
    """Layers in the order in which they run: the first and the last ones stay in high precision.

    `wrap` takes it in place of `Rules`, with `inputs` or `strict`, from which the order follows.

    Attributes:
      recipe: The recipe of all other layers.
      first, last: How many layers stay at either end.

    Examples:
      >>> qt.policies.FirstLast(qt.recipes.te_current).rules(["embed", "mlp", "head"]).lookup("mlp")
      <Recipe forward: (e4m3fn by tensor) x (e4m3fn by tensor); \
dgrad: (e5m2 by tensor) x (e4m3fn by tensor); wgrad: (e4m3fn by tensor) x (e5m2 by tensor)>
    """

    recipe: Recipe
    first: int = 1
    last: int = 1

    def __post_init__(self) -> None:
        check_recipe("first_last_high_precision", self.recipe)
        for name in ("first", "last"):
            count = plain_number(getattr(self, name))
            object.__setattr__(self, name, count)
            if type(count) is not int or count < 0:
                raise ValueError(
                    f"first_last_high_precision: {name}={count!r}, expected an integer of 0 or more"
                )

    def rules_for(self, inputs: Any, layers_in: Callable[[Any], Sequence[str]]) -> Rules[Recipe]:
        """The rules for a model, from the order in which its kernels run with these inputs."""
        if inputs is None:
            raise ValueError(
                "wrap: first_last_high_precision needs the order in which layers run, and there "
                "are no inputs to trace the model with; write wrap(model, policy, inputs=(x,))"
            )
        return self.rules(layers_in(inputs))

    def rules(self, paths: Sequence[str]) -> Rules[Recipe]:
        """The rules for layers of these paths, in the order in which they run."""
        if paths and len(paths) <= self.first + self.last:
            raise ValueError(
                f"wrap: first_last_high_precision leaves none of {len(paths)} layers to quantize, "
                f"expected more than {self.first} first and {self.last} last ones; give "
                "first_last_high_precision other numbers, or wrap the recipe itself"
            )
        kept = [*paths[: self.first], *paths[max(0, len(paths) - self.last) :]]
        return Rules({f"^{re.escape(path)}$": None for path in kept}, default=self.recipe)


def first_last_high_precision(recipe: Recipe, *, first: int = 1, last: int = 1) -> FirstLast:
    """All layers by `recipe`, but the first and the last ones in high precision.

    Source: arXiv:1902.08153, section 3; arXiv:2509.25149, which keeps the last ones.

    Examples:
      >>> rngs = nnx.Rngs(0)
      >>> model = nnx.Sequential(*(nnx.Linear(4, 4, rngs=rngs) for _ in range(3)))
      >>> policy = qt.policies.first_last_high_precision(qt.recipes.te_current)
      >>> wrapped = qt.nnx.wrap(model, policy, inputs=(jnp.ones((1, 4)),))
      >>> sorted({product.path for product in qt.nnx.report(wrapped, jnp.ones((1, 4))).left})
      ['layers/0', 'layers/2']
    """
    return FirstLast(recipe, first, last)


def warm_up(recipe: Recipe, steps: int) -> Recipe:
    """A recipe that computes in high precision until a layer has been trained for `steps` steps.

    Each layer counts its steps, as it counts those for the keys of stochastic rounding; both ways
    to compute are in one program, so nothing is traced again. Products that keep no state, those of
    your own modules without `inputs`, are quantized from the first step on.

    Raises:
      ValueError: `steps` is no integer of 0 or more.

    Examples:
      >>> recipe = qt.policies.warm_up(qt.recipes.te_current, 1)
      >>> layer = qt.nnx.Fp8Linear(1, 1, rngs=nnx.Rngs(0), use_bias=False, recipe=recipe)
      >>> layer.kernel[...] = jnp.ones((1, 1))
      >>> step = qt.nnx.value_and_grad(lambda layer, x: layer(x).sum())
      >>> [float(step(layer, jnp.asarray([[0.3], [448.0]]))[0]) for _ in range(2)]
      [448.29998779296875, 448.3125]
    """
    return dataclasses.replace(check_recipe("warm_up", recipe), warm_up=steps)


def gather_codes(recipe: Recipe, axis_name: str, axis: int | None = None) -> Recipe:
    """A recipe for kernels that are sharded along a mesh axis (FSDP): devices send their codes.

    Each device rounds its shard; the codes, of 8 bits, are gathered for the matmul, and again for
    its derivative, where XLA would gather the kernel. Operands of more than 8 bits move as they
    are. The mesh is that of `jax.set_mesh`.

    Args:
      axis_name: The mesh axis.
      axis: The axis of the kernels that is cut, as `Operand.gather_axis`.

    Examples:
      >>> print(qt.policies.gather_codes(qt.recipes.te_current, "fsdp").forward[1])
      e4m3fn by tensor, current, codes gathered over fsdp
    """

    def sent(operand: Operand | None) -> Operand | None:
        if operand is None or operand.spec.element.bits > 8:
            return operand
        return dataclasses.replace(operand, gather=axis_name, gather_axis=axis)

    lhs, rhs = check_recipe("gather_codes", recipe).forward
    cotangent, of_dgrad = recipe.dgrad
    return dataclasses.replace(recipe, forward=(lhs, sent(rhs)), dgrad=(cotangent, sent(of_dgrad)))


def join(recipe: Recipe, *groups: Sequence[str]) -> Recipe:
    """A recipe for kernels that engines join, such as q, k and v: these have one tensor scale.

    It is that of the largest magnitude of them all, in each step, as `checkpoints.export` and
    `convert` write it: the exported model computes with the scales of training. Operands without a
    tensor scale stay as they are. Of kernels in a stack each layer has its own.

    Args:
      groups: The names of the layers, or of the kernels, that are joined. Their paths differ in
        these alone: "blocks/0/q/kernel", "blocks/0/k/kernel".

    Raises:
      TypeError: A group is no sequence of names.
      ValueError: A kernel has a tensor scale and a transform, or a calibrated scale.

    Examples:
      >>> weights = qt.spec("nvfp4").with_(tensor_scale_divides=True)  # compressed-tensors'
      >>> recipe = qt.Recipe((None, weights), gradient=None)
      >>> print(qt.policies.join(recipe, ["q", "k", "v"], ["gate", "up"]).forward[1])
      nvfp4, tensor scale divides, one scale for q, k, v, one scale for gate, up
    """
    for group in groups:
        if isinstance(group, str) or not all(isinstance(name, str) for name in group):
            raise TypeError(f'join: group {group!r}, expected names such as ["q", "k", "v"]')
        if any(set(name) & set("./") for name in group):
            raise ValueError(
                f"join: group {list(group)}, expected single names of layers or kernels, the part "
                "of their paths that differs: 'q' of 'attention/q/kernel'"
            )
    joined = tuple(map(tuple, groups))

    def of(operand: Operand | None) -> Operand | None:
        if operand is None or operand.spec.tensor_scale is None:
            return operand
        return dataclasses.replace(operand, joined=joined)

    (lhs, rhs), (cotangent, of_dgrad) = check_recipe("join", recipe).forward, recipe.dgrad
    return dataclasses.replace(recipe, forward=(lhs, of(rhs)), dgrad=(cotangent, of(of_dgrad)))
