"""`value_and_grad` and `roll`: a training step that also updates the state of matmuls."""

from collections.abc import Callable
from typing import Any

from flax import linen, nnx

from qtoolkit.nnx._call import bound_function
from qtoolkit.nnx._state import Probe, ProductState, Statistic
from qtoolkit.products.internal import flow


def value_and_grad(
    loss: Callable[..., Any],
    wrt: Any = nnx.Param,
    *,
    has_aux: bool = False,
    metrics: bool = False,
) -> Callable[..., Any]:
    """`nnx.value_and_grad` for wrapped models: each call also updates delayed scales and keys.

        loss, grads = qtoolkit.nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)

    `nnx.grad` and `nnx.value_and_grad` work as well: the forward pass then updates the histories of
    inputs and kernels, and cotangents have current scales; a warning says so. With `graph=False`
    they differentiate by every array of an argument: split the model, and pass parameters and state
    as two. Under `jax.grad` of a function that closes over the model all scales are current ones
    and no history is updated; a warning says so. Of a copy that `nnx.merge` makes, return the
    state, as for statistics of BatchNorm. The devices of `jax.pmap` and `jax.shard_map` share one
    history. Modules from `qtoolkit.linen.wrap` in `nnx.bridge.ToNNX` have current scales here: wrap
    the nnx model around them instead.

    A step with an infinity or a NaN in an operand or a cotangent does not change the histories of
    that matmul. Its state `bad` counts such steps, and those with an operand that is more than
    twice as large as the history by which it is scaled: without a `margin` such elements saturate.

    Args:
      loss: A function of the model and further arguments that returns a scalar or (scalar, aux).
      wrt: What to differentiate by, as a filter of nnx.
      has_aux: As in `nnx.value_and_grad`.
      metrics: Whether to measure what rounding did in this very step. The function then returns
        them as its third result, a flat dictionary of scalars for a logger:
        {"layers/0:kernel/lhs/saturated": ...}, by matmul, operand and number. The numbers are
        "saturated", "underflowed" and "bad", and "amax" and "scale", which may be up to 12.5 % too
        large if the matmul runs several times. The first three are shares of at most 65,536
        elements, evenly spaced, and of the largest finite one. Bad are elements that are not
        finite, and those that are beyond the format's largest value by more than a factor of 2.

    Returns:
      A function of (model, *args, **kwargs) that returns (value, gradients), or ((value, aux),
      gradients). The model is one `nnx.Module`; pass several as `nnx.List([...])` or
      `nnx.Dict(...)`. Gradients hold what `wrt` selects and no probes, so they can be clipped by
      their global norm or averaged like those of the plain model.

    Raises:
      TypeError: `wrt` is no filter but the number of an argument, or a `nnx.DiffState`.

    Raises (when it is called):
      TypeError: The model is no `nnx.Module`; `wrt` selects kernels of a model from `quantize`,
        which have no derivative.
      ValueError: `wrt` selects nothing.

    Examples:
      >>> model = qt.nnx.wrap(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), qt.recipes.te_delayed_hybrid)
      >>> def loss(model, x):
      ...     return model(x).mean()
      >>> value, grads = qt.nnx.value_and_grad(loss)(model, jnp.asarray([[0.3, 448.0]]))
      >>> [f"{g:.4f}" for g in grads["kernel"][...].ravel()]  # x, of which 0.3 was rounded
      ['0.3125', '448.0000']
    """
    if isinstance(wrt, nnx.DiffState) or type(wrt) is int:
        raise TypeError(
            f"value_and_grad: wrt={wrt!r}, expected a filter of Variables of the model, the first "
            "argument of the loss, e.g. wrt=nnx.Param"
        )

    def function(model: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        _check_model(model)
        return flow.value_and_grad(_Step(model, wrt, has_aux), loss, args, kwargs, metrics=metrics)

    return function


class _Step:
    """A training step of an nnx model, see `products._flow.Step`."""

    package = "nnx"

    def __init__(self, model: nnx.Module, wrt: Any, has_aux: bool) -> None:
        self.model, self.has_aux = model, has_aux
        self.wanted = nnx.All(wrt, nnx.Not(Statistic))
        trained = nnx.state(model, self.wanted)
        if not trained:
            raise ValueError(
                f"value_and_grad: wrt={wrt!r} selects nothing that {type(model).__name__} trains, "
                "expected a filter of its Variables, e.g. wrt=nnx.Param"
            )
        self.trained = nnx.to_pure_dict(trained)

    def called(self, loss: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return bound_function(loss, self.model, args, kwargs)

    def differentiated(
        self, loss: Callable[..., Any], zeros: Any, args: Any, kwargs: Any
    ) -> tuple[Any, Any, Any, Any]:
        both = nnx.DiffState(0, nnx.Any(self.wanted, Probe))
        # `compat`: in the graph mode, whatever mode the user has set for nnx.
        graded = nnx.compat.value_and_grad(loss, argnums=(both, 1), has_aux=self.has_aux)
        value, (found, rows) = graded(self.model, zeros, *args, **kwargs)
        probes, grads = nnx.split_state(found, Probe, ...)
        return value, grads, probes, rows

    def finished(self, value: Any, grads: Any, probes: Any) -> tuple[Any, ...]:
        roll(self.model, probes)
        return value, grads


def _check_model(model: Any) -> None:
    if isinstance(model, nnx.Pytree):
        return
    parts = tuple(model) if isinstance(model, tuple | list) else ()
    what = "pass several models as one, nnx.List([...]) or nnx.Dict(...), which the loss gets"
    if isinstance(model, linen.Module):
        what = "use qtoolkit.linen.value_and_grad"
    elif any(isinstance(part, nnx.GraphDef) for part in parts):
        what = "write nnx.merge(*model)"
    raise TypeError(
        f"value_and_grad: model has type {type(model).__name__}, expected an nnx.Module; {what}"
    )


def roll(model: nnx.Module, probes: Any) -> None:
    """Updates histories and keys after a step, from the gradients of the model's probes.

    `value_and_grad` calls it. Call it yourself in training loops that differentiate by themselves,
    or that add up micro-batches.

    Args:
      model: A model from `wrap`; its histories and keys are changed.
      probes: A state with the gradients of its `Probe` variables; or their sum, or mean, over
        several micro-batches.

    Raises:
      TypeError: `probes` is no `nnx.State`.
      ValueError: The model has delayed scales, and `probes` has a gradient for none of them.

    Examples:
      >>> model = qt.nnx.wrap(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), qt.recipes.te_delayed_hybrid)
      >>> wrt = nnx.DiffState(0, nnx.Any(nnx.Param, qt.nnx.Probe))
      >>> grads = nnx.grad(lambda model: model(jnp.full((1, 2), 448.0)).sum(), argnums=wrt)(model)
      >>> qt.nnx.roll(model, nnx.filter_state(grads, qt.nnx.Probe))
      >>> bad, history = jax.tree.leaves(nnx.state(model, qt.nnx.ScalingState))
      >>> float(history.max())  # 448, known to 12.5 %
      480.0
    """
    differentiate = (
        "differentiate by probes, too, with wrt = nnx.DiffState(0, nnx.Any(nnx.Param, "
        "qtoolkit.nnx.Probe)), or use qtoolkit.nnx.value_and_grad, which updates"
    )
    if not isinstance(probes, nnx.State):
        raise TypeError(
            f"roll: probes has type {type(probes).__name__}, expected an nnx.State with the "
            f"gradients of the model's probes; {differentiate}"
        )
    histograms = {tuple(path): probe[...] for path, probe in nnx.to_flat_state(probes)}
    products = [
        ((*path, "probe"), module)
        for path, module in nnx.iter_modules(model)
        if isinstance(module, ProductState)
    ]
    delayed = [path for path, product in products if hasattr(product, "history")]
    # Without this, gradients of parameters alone would update no history, silently.
    if delayed and not any(path in histograms for path in delayed):
        raise ValueError(
            f"roll: probes has no gradient for any of the {len(delayed)} delayed matmuls of "
            f"{type(model).__name__}, expected one for each; {differentiate}"
        )
    for path, product in products:
        product.roll(histograms.get(path))
