"""Models that nobody here wrote, as they are: wrapped, reported, trained for a step.

Command: python experiments/public_models.py [--flax FOLDER] [--bonsai FOLDER] [--only NAME ...]
    [--results experiments/results]
It installs nothing. Packages: "transformers<4.51" (the last of its Flax models; PyTorch is not
needed), recurrentgemma with jaxtyping and "typeguard<3", timesfm, jraph. Folders: clones of
github.com/google/flax (its examples) and of github.com/jax-ml/bonsai. A model whose source is
missing is named and skipped. With --results every model that is done is stored at once, and a model
that is stored already is not run again; delete the file to begin anew.

Every model is small and random. It is wrapped with `te_current` and trained one step of Adam
towards random targets. The command fails where
- the report has a matmul that is not quantized, except of integers, or counts others in the forward
  pass than the program of the plain model has, where this file counts them;
- a loss is not finite, or the cosine between the gradients of the wrapped and the plain model is
  at most 0.8, or exactly 1. Seen: 0.966 and more but for UMT5, whose attention is not scaled, with
  0.855, and the ResNet of transformers, normalized over four images, with 0.902. Where bfloat16
  alone rounds the operands these two have 0.9989 and 0.988, angles that are 12 and 3 times smaller;
  the steps of E4M3 are 16 times as large as those of bfloat16.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from _public_models import FOLDERS, MODELS, Task
from benchmarks._results import Folder, Rows
from flax import nnx

import qtoolkit as qt

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


def wrapped(task: Task) -> Task:
    wrap = qt.nnx.wrap if task.variables is None else qt.linen.wrap
    return task._replace(model=wrap(task.model, qt.recipes.te_current))


def reported(task: Task) -> Any:
    if task.variables is None:
        return qt.nnx.report(task.model, *task.arguments, **task.options)
    return qt.linen.report(
        task.model, task.variables, *task.arguments, rngs=task.rngs, **task.options
    )


def function_of(task: Task) -> tuple[Any, Callable[[Any], list[jax.Array]]]:
    """The parameters, and the outputs of floats as a function of them."""
    if task.variables is None:
        graph, parameters, others = nnx.split(task.model, nnx.Param, ...)

        def call(parameters: Any) -> Any:
            model = nnx.merge(graph, parameters, others, copy=True)
            arguments, options = jax.tree.map(lambda x: x, (task.arguments, task.options))
            return model(*arguments, **options)  # a copy of a cache, which it may write
    else:
        parameters = task.variables["params"]
        options = {"rngs": task.rngs, "mutable": list(task.variables.keys() - {"params"})}

        def call(parameters: Any) -> Any:
            variables = {**task.variables, "params": parameters}
            return task.model.apply(variables, *task.arguments, **options, **task.options)[0]

    return parameters, lambda p: [x for x in jax.tree.leaves(call(p)) if _is_float(x)]


def _is_float(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def count_products(jaxpr: Any) -> int:
    """Products of floats in a program and in those inside of it. One in a loop counts once."""
    total = 0
    for eqn in jaxpr.eqns:
        total += eqn.primitive.name in PRODUCTS and _is_float(eqn.outvars[0].aval)
        for value in eqn.params.values():
            for inner in value if isinstance(value, list | tuple) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                total += count_products(inner) if hasattr(inner, "eqns") else 0
    return total


def loss_of(outputs: Callable[[Any], list[jax.Array]]) -> Callable[[Any], jax.Array]:
    """The squared distance of all outputs from random targets."""

    def loss(parameters: Any) -> jax.Array:
        outs = outputs(parameters)
        keys = jax.random.split(jax.random.key(7), len(outs))
        pairs = [(out, jax.random.normal(k, out.shape)) for k, out in zip(keys, outs, strict=True)]
        return sum(jnp.mean((out.astype(jnp.float32) - target) ** 2) for out, target in pairs)

    return loss


def cosine(tree: Any, other: Any) -> float:
    a, b = (
        np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(t)])
        for t in (tree, other)
    )
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def figures_of(plain: Task) -> dict[str, Any]:
    """What became of a model."""
    started = time.perf_counter()
    task = wrapped(plain)
    report = reported(task)
    parameters, outputs = function_of(task)
    plain_parameters, plain_outputs = function_of(plain)
    step = jax.jit(jax.value_and_grad(loss_of(outputs)))
    before, grads = step(parameters)
    wanted = jax.jit(jax.grad(loss_of(plain_outputs)))(plain_parameters)
    optimizer = optax.adam(1e-3)
    updates, _ = optimizer.update(grads, optimizer.init(parameters), parameters)
    after, _ = step(optax.apply_updates(parameters, updates))
    every = [*report.quantized, *report.left]
    return {
        "kind": "nnx" if plain.variables is None else "linen",
        "forward": sum(p.count for p in every if p.part == "forward"),
        "forward, counted": count_products(jax.make_jaxpr(plain_outputs)(plain_parameters).jaxpr),
        "products": sum(p.count for p in every),
        "quantized": sum(p.count for p in report.quantized),
        "left": [f"{p.count} {p.part} {p.operands} at {p.where}: {p.reason}" for p in report.left],
        "loss": float(before),
        "after a step": float(after),
        "cosine": cosine(grads, wanted),
        "seconds": round(time.perf_counter() - started, 1),
    }


def problems(found: dict[str, Any]) -> Iterator[str]:
    # Integers are not rounded; everything else is.
    yield from (f"left: {product}" for product in found["left"] if "integers" not in product)
    if found["forward"] != found["forward, counted"]:
        yield f"{found['forward, counted']} products forward, {found['forward']} in the report"
    if not np.isfinite([found["loss"], found["after a step"]]).all():
        yield "a loss is not finite"
    if not 0.8 < found["cosine"] < 1:
        yield f"the gradients have cosine {found['cosine']} to the plain model's"


def main(
    flax: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="A clone of google/flax.")
    ] = None,
    bonsai: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="A clone of jax-ml/bonsai.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Parts of names.")] = None,
    results: Folder = None,
) -> None:
    FOLDERS.update({k: v for k, v in (("flax", flax), ("bonsai", bonsai)) if v is not None})
    names = [name for name in MODELS if not only or any(part in name for part in only)]
    if not names:
        raise typer.BadParameter(f"no model has {only}, expected parts of: {', '.join(MODELS)}")
    rows = Rows("public_models", results)
    is_wrong = False
    for name in names:
        try:
            found = rows.get(model=name) or rows.add({"model": name}, figures_of(MODELS[name]()))
        except ModuleNotFoundError as error:
            print(f"{name:<30}skipped: {error}")
            continue
        except KeyError as error:
            if error.args[0] not in ("flax", "bonsai"):
                raise
            print(f"{name:<30}skipped: give --{error.args[0]}")
            continue
        print(
            f"{name:<30}{found['products']:>5} products, {found['quantized']:>4} quantized; loss "
            f"{found['loss']:.4f} -> {found['after a step']:.4f}; cosine {found['cosine']:.4f}",
            flush=True,
        )
        for problem in problems(found):
            print(f"    WRONG: {problem}", flush=True)
            is_wrong = True
    if is_wrong:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
