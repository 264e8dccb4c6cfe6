"""Splits tensors that hold all experts of a layer into a weight for each expert. No JAX here.

Of some models the unquantized checkpoint has all experts of a layer in one tensor, and loaders read
quantized ones one by one: so are Qwen's own FP8 checkpoints of Qwen3.5, and what llm-compressor
makes of Llama 4.
"""

import dataclasses
import functools
from collections.abc import Container, Iterator
from typing import NamedTuple

import numpy as np

from qtoolkit.checkpoints._checkpoint import Checkpoint, Tensor, Transposer
from qtoolkit.checkpoints._roles import Roles, is_stack_of_experts

_QWEN = ("compressed-tensors", "finegrained-fp8", "modelopt")
# By `model_type` the layouts whose loaders read experts one by one. Source: transformers,
# conversion_mapping.py, and for Llama 4 quantizers/base.py, SequentialLlama4TextExperts; vLLM,
# models/qwen3_5.py and llama4.py. Not gpt-oss: the rows of its gate and up alternate.
_LAYOUTS = {
    "qwen3_5_moe": _QWEN,
    "qwen3_5_moe_text": _QWEN,
    "llama4": ("compressed-tensors",),
    "llama4_text": ("compressed-tensors",),
}


def split_for(source: Checkpoint, layout: str) -> Checkpoint:
    """The checkpoint as loaders of a layout read its experts."""
    model = str(source.config.get("model_type"))
    return _split(source, source.tensors if layout in _LAYOUTS.get(model, ()) else ())


def split_alike(a: Checkpoint, b: Checkpoint) -> tuple[Checkpoint, Checkpoint]:
    """Two checkpoints; stacks of experts are split where the other has a weight for each expert."""
    return _split_like(a, b), _split_like(b, a)


def split(source: Checkpoint) -> Checkpoint:
    """The checkpoint with a weight for each expert in place of each stack."""
    return _split(source, source.tensors)


def _split_like(a: Checkpoint, b: Checkpoint) -> Checkpoint:
    """`a` with those stacks split of which `b` has the first expert on its own."""
    return _split(a, {n for n in a.tensors if _name(n, 0, _projections(n)[0]) in b.tensors})


class Piece(NamedTuple):
    """Where in a stack the weight of an expert is: its stack, its number, and its part of the rows.

    `is_turned` says that the stack is [experts, inputs, outputs].
    """

    stack: str
    expert: int
    part: int
    parts: int
    is_turned: bool


def pieces_of(source: Checkpoint) -> dict[str, Piece]:
    """By the names that they get when a stack is split, the weights of all experts in stacks."""
    roles, pieces = Roles(source.tensors, source.config), {}
    for stack in filter(is_stack_of_experts, source.tensors.values()):
        projections, is_turned = _projections(stack.name), bool(roles.outputs_last(stack))
        for expert, part in np.ndindex(stack.shape[0], len(projections)):
            name = _name(stack.name, expert, projections[part])
            pieces[name] = Piece(stack.name, expert, part, len(projections), is_turned)
    return pieces


def _split(source: Checkpoint, names: Container[str]) -> Checkpoint:
    stacks = [t for t in source.tensors.values() if t.name in names and is_stack_of_experts(t)]
    if not stacks:
        return source
    roles, transposer = Roles(source.tensors, source.config), Transposer()
    split = {one.name: [*_experts(one, roles.outputs_last(one), transposer)] for one in stacks}
    tensors = {t.name: t for one in source.tensors.values() for t in split.get(one.name) or [one]}
    return dataclasses.replace(source, tensors=tensors)


def _experts(stack: Tensor, outputs_last: bool | None, transposer: Transposer) -> Iterator[Tensor]:
    """The weights, [outputs, inputs]; nothing if they cannot be told apart."""
    projections = _projections(stack.name)
    data = transposer.transposed(stack) if outputs_last else stack
    count, rows, columns = data.shape
    if outputs_last is None or rows % len(projections):
        return
    weights = count * len(projections)
    nbytes, stored = data.nbytes // weights, stack.stored_nbytes

    def read_into(index: int, start: int, buffer: memoryview) -> None:
        data.read_into(index * nbytes + start, buffer)

    for index in range(weights):  # gate and up of an expert are halves of its rows
        expert, place = divmod(index, len(projections))
        yield dataclasses.replace(
            stack,
            name=_name(stack.name, expert, projections[place]),
            shape=(rows // len(projections), columns),
            read_into=functools.partial(read_into, index),
            encoding=None,  # that of the stack describes all experts
            reader=None,
            # Rounded so that the weights of a stack together have all of its bytes.
            stored_nbytes=stored * (index + 1) // weights - stored * index // weights,
        )


def _projections(name: str) -> tuple[str, ...]:
    last = name.rpartition(".")[2]
    return ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)


def _name(stack: str, expert: int, part: str) -> str:
    return f"{stack.rpartition('.')[0]}.{expert}.{part}.weight"
