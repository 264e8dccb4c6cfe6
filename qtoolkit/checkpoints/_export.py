"""`export`: arrays in memory as the files of a layout have them, weight by weight on its devices.

The plan is that of `convert`, made from names, dtypes and shapes alone. A weight is quantized by
`qtoolkit.quantize`, or is a `QArray` already; `_stored_arrays` makes of it what the `Encoding` of
the layout says. All of this is compiled once for each shape and format.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qtoolkit.casts.internal import codes_from_dtype, dtype_from_codes
from qtoolkit.checkpoints._arguments import InputScales, PlanOptions
from qtoolkit.checkpoints._checkpoint import Checkpoint, Tensor
from qtoolkit.checkpoints._checks import compile_patterns
from qtoolkit.checkpoints._experts import Piece, pieces_of
from qtoolkit.checkpoints._load import Names, Place
from qtoolkit.checkpoints._plan import make_plan
from qtoolkit.checkpoints._pytrees import is_qarray, named_arrays
from qtoolkit.checkpoints._quantize import tensor_scales_from
from qtoolkit.checkpoints._report import Plan, TensorPlan
from qtoolkit.checkpoints._roles import AxisChoice
from qtoolkit.checkpoints._tensors import DTYPE_OF, NUMPY_DTYPES, CheckpointError, listed, shown
from qtoolkit.checkpoints.layouts._encoding import Encoding, Packing, pack_zero_points, words_of
from qtoolkit.formats import E8M0FNU, FormatLike, Rules, SpecLike
from qtoolkit.scaling import QArray, amax, quantize

_WHERE = "export"
_EXPERT = "{expert}"


class Leaf(NamedTuple):
    """An array of a tree, and how the checkpoint has it: its shape, and the order of its axes.

    `axes` are those by which the tensor of the checkpoint is transposed to the array in the tree;
    None: it is not. Of a stack of experts it is the one of an `expert`, or a `piece` of the stack.
    """

    array: Any
    shape: tuple[int, ...]
    axes: tuple[int, ...] | None
    expert: int | None = None
    piece: Piece | None = None

    def oriented(self) -> Any:
        """The array as the checkpoint has it."""
        array = self.array.unpack() if is_qarray(self.array) else self.array
        array = array if self.expert is None else _expert(array, self.expert)
        if self.axes is None:
            array = array.reshape(self.shape)
        else:
            array = array.reshape(tuple(self.shape[axis] for axis in self.axes))
            array = array.transpose(*np.argsort(self.axes).tolist())
        if self.piece is None:
            return array
        array = _expert(array, self.piece.expert)
        array = array.T if self.piece.is_turned else array
        rows = array.shape[0] // self.piece.parts
        return array[self.piece.part * rows : (self.piece.part + 1) * rows]

    @property
    def is_whole(self) -> bool:
        return self.expert is None and self.piece is None


def _expert(stack: Any, number: int) -> Any:
    if is_qarray(stack):
        return stack[number]
    return jax.lax.dynamic_index_in_dim(stack, jnp.int32(number), keepdims=False)


@dataclasses.dataclass(frozen=True, eq=False)
class Export:
    """What `export` returns: iterate over it for (name, array) pairs.

    Attributes:
      plan: What is done to each tensor; `plan.quantization_config` is for config.json.
    """

    plan: Plan
    _leaves: Mapping[str, Leaf]
    _tensors: Sequence[TensorPlan]

    def __iter__(self) -> Iterator[tuple[str, jax.Array | np.ndarray]]:
        groups: dict[str, list[str]] = {}
        for tensor in self.plan.tensors:
            if tensor.group:
                groups.setdefault(tensor.group, []).append(tensor.name)
        scales: dict[str, jax.Array] = {}
        for tensor in self._tensors:
            second = None
            if tensor.encoding is not None and tensor.encoding.tensor_scale is not None:
                group = tensor.group or tensor.name
                if group not in scales:
                    leaves = [self._leaves[name] for name in groups.get(group, [group])]
                    members = [x.array if x.is_whole else x.oriented() for x in leaves]
                    scales[group] = _tensor_scale(members, tensor.encoding)
                second = scales[group]
            yield from _weight_entries(tensor, self._leaves[tensor.name], second)


def export(
    tree: Any,
    config: Mapping[str, Any] | None = None,
    *,
    names: Names | None = None,
    only: Sequence[str] = (),
    format: SpecLike | Rules[Any] = "e4m3fn",
    scaling: str | None = None,
    layout: str | None = None,
    skip: Sequence[str] = (),
    keep_dtype: FormatLike | None = None,
    channel_axis: AxisChoice = "auto",
    input_scales: InputScales | None = None,
    allow_split: bool = False,
    keep_unfitting: bool = False,
) -> Export:
    """Quantize the arrays of a model as `convert` does, without a file: for an engine at work.

        for name, array in qtoolkit.checkpoints.export(nnx.state(model, nnx.Param), config, ...):
            engine.load_weights([(name, array)])

    Names, dtypes, shapes and bytes are those of the files that `convert` makes of the saved model.
    Arrays stay on their devices, sharded as they are; at most one weight is held besides the model.
    A second call with the same shapes compiles nothing.

    Args:
      tree: Arrays of JAX by name, nested as in `save`: `nnx.state(model, nnx.Param)`, linen's
        params. A `QArray`, as in a model of `nnx.quantize`, keeps its codes and scales, such as
        those that training used; its format must be the one that is written.
      config: The content of the model's config.json, as the planner needs it; None: none.
      names: For a name in the tree its name in the checkpoint, as in `load`, by a table or a
        function: a name, (name, axes), or (name, axes, shape) where the checkpoint's tensor has
        another rank. `axes` are those by which `load` transposes. A stack of experts whose
        checkpoint has a tensor for each has "{expert}" in the name, for the place along its first
        axis; axes and shape are then those of one expert.
      only: Regular expressions; only weights with such a name in the checkpoint are sent. Scales
        that several weights share are those of the whole.
      input_scales: As in `convert`; by names in the tree, too, as `qtoolkit.nnx.input_scales`
        gives those that training used.
      format, scaling, layout, skip, keep_dtype, channel_axis, allow_split, keep_unfitting: As in
        `convert`.

    Returns:
      An iterable of (name, array); its `plan` has the quantization config.

    Raises:
      CheckpointError: As `convert`; a name is given twice; or a `QArray` is not stored as the
        layout says.

    Examples:
      >>> weights = {"up": {"weight": jnp.ones((64, 32))}, "norm": {"weight": jnp.ones(32)}}
      >>> for name, array in qt.checkpoints.export(weights, layout="compressed-tensors"):
      ...     print(name, array.dtype, array.shape)
      norm.weight float32 (32,)
      up.weight float8_e4m3fn (64, 32)
      up.weight_scale float32 (64, 1)
    """
    leaves: dict[str, Leaf] = {}
    targets: dict[str, list[str]] = {}
    for name, array in named_arrays(_WHERE, tree):
        place: Place = name
        if names is not None:
            place = names(name) if callable(names) else names.get(name, name)
        for target, leaf in _leaves(name, array, place):
            if target in leaves:
                raise CheckpointError(
                    f"{_WHERE}: {shown(target)}: two arrays have this name, expected one; correct "
                    "names"
                )
            leaves[target] = leaf
            targets.setdefault(name, []).append(target)
    tensors = {
        name: Tensor(name, DTYPE_OF[np.dtype(leaf.array.dtype).name], leaf.shape, _refuse_to_read)
        for name, leaf in sorted(leaves.items())
    }
    if isinstance(input_scales, Mapping):  # by the name in the tree, or in the checkpoint
        pairs = [(targets.get(name, [name]), scale) for name, scale in input_scales.items()]
        input_scales = {target: scale for some, scale in pairs for target in some}
    source = Checkpoint(_WHERE, tensors, config=config or {})
    options = PlanOptions(
        format=format,
        scaling=scaling,
        layout=layout,
        skip=skip,
        keep_dtype=keep_dtype,
        channel_axis=channel_axis,
        input_scales=input_scales,
        allow_split=allow_split,
        keep_unfitting=keep_unfitting,
    )
    plan = make_plan(source, options)
    for name, piece in pieces_of(source).items():  # the layout may have a weight for each expert
        leaves.setdefault(name, leaves[piece.stack]._replace(piece=piece))
    patterns = compile_patterns(only, "only")
    chosen = [t for t in plan.tensors if not only or any(p.search(t.name) for p in patterns)]
    if not chosen:
        raise CheckpointError(
            f"{_WHERE}: only={only!r} matches nothing, expected a part of a name in the "
            f"checkpoint, such as {listed(t.name for t in plan.tensors)}"
        )
    return Export(plan, leaves, chosen)


def _leaves(name: str, array: Any, place: Place) -> Iterator[tuple[str, Leaf]]:
    """The names in the checkpoint, and how the checkpoint has the array, or each expert of it."""
    if not hasattr(array, "shape") or str(array.dtype) not in DTYPE_OF:
        raise CheckpointError(
            f"{_WHERE}: {shown(name)} has {getattr(array, 'dtype', type(array).__name__)}, "
            "expected an array; give parameters alone, e.g. nnx.state(model, nnx.Param)"
        )
    array = array if is_qarray(array) else jnp.asarray(array)
    target, axes, *rest = (place, None) if isinstance(place, str) else place
    has_experts = _EXPERT in target
    own = tuple(array.shape[1:] if has_experts else array.shape)
    order = range(len(own)) if axes is None else axes
    is_order = sorted(order) == [*range(len(order))] and (rest or len(order) == len(own))
    shape = tuple(rest[0]) if rest else tuple(own[i] for i in np.argsort(order)) if is_order else ()
    if not is_order or len(shape) != len(order) or math.prod(shape) != math.prod(own):
        raise CheckpointError(
            f"{_WHERE}: {shown(name)}, {list(array.shape)}: axes {tuple(order)} and shape "
            f"{list(shape)} of {shown(target)}, expected an order of the axes of a tensor of that "
            "size; correct names"
        )
    whole = Leaf(array, shape, None if axes is None else tuple(axes))
    if not has_experts:
        yield target, whole
        return
    for expert in range(array.shape[0] if array.ndim else 0):
        yield target.replace(_EXPERT, str(expert)), whole._replace(expert=expert)


def _refuse_to_read(start: int, buffer: memoryview) -> None:
    raise AssertionError("a plan reads no weights")


def _weight_entries(
    tensor: TensorPlan, leaf: Leaf, tensor_scale: jax.Array | None
) -> Iterator[tuple[str, jax.Array | np.ndarray]]:
    """The entries of a tensor: (name, array). NumPy's for what JAX has no dtype for: int64."""
    x, encoding = leaf.oriented(), tensor.encoding
    if encoding is None:
        if is_qarray(x):
            x = x.dequantize()
        if tensor.spec is not None:  # a cast, in which infinities stay
            codes = quantize(x, tensor.spec, saturation="propagate").codes
            x = _in_dtype(codes, tensor.dtype, tensor.spec.element)
        yield tensor.name, x
        return
    for entry, values in encoding.constant_pairs:
        yield entry.name, values if entry.dtype == "I64" else jnp.asarray(values)
    if not x.size:
        zeros = jnp.zeros(encoding.codes.shape, NUMPY_DTYPES[tensor.dtype])
        ones = None if encoding.scale is None else jnp.ones(encoding.scale.shape, np.float32)
        yield from ((entry.name, array) for entry, array in encoding.pairs(zeros, ones))
        return
    if encoding.transposed:
        x = x.transpose(*range(x.ndim - 2), x.ndim - 1, x.ndim - 2)
    if is_qarray(x):
        q = _as_stored(x, encoding, tensor_scale)
    else:
        q = quantize(x, encoding.array_spec, tensor_scale=tensor_scale)
    entries = encoding.codes, encoding.scale, encoding.zero_point
    dtypes = tuple("" if entry is None else entry.dtype for entry in entries)
    packings = encoding.packing, encoding.zero_packing
    codes, scale, zero_point = _stored_arrays(q, packings, dtypes)
    for entry, array in encoding.pairs(codes, scale, zero_point, q.tensor_scale):
        yield entry.name, array.reshape(entry.shape)


def _as_stored(q: QArray, encoding: Encoding, tensor_scale: jax.Array | None) -> QArray:
    """A quantized array that the layout stores as it is; raises for another."""
    spec, lengths = encoding.spec, q.blocks.lengths
    is_same = (
        (q.spec.element, q.spec.scale, q.spec.tensor_scale, q.spec.tensor_scale_divides)
        == (spec.element, spec.scale, spec.tensor_scale, spec.tensor_scale_divides)
        and lengths == tuple(map(min, encoding.lengths, q.shape))
        and q.spec.zero_point == spec.zero_point
        and not q.transform
    )
    if not is_same:
        raise CheckpointError(
            f"{_WHERE}: tensor {shown(encoding.name)}: {q.spec.name}, in blocks of {lengths}, "
            f"expected {spec.name}, in blocks of {encoding.lengths}, as the layout stores it; give "
            "its format and scaling, or the model before it was quantized"
        )
    second = q.tensor_scale
    if second is not None and tensor_scale is not None and bool(second != tensor_scale):
        raise CheckpointError(
            f"{_WHERE}: tensor {shown(encoding.name)}: its tensor scale is {second}, and "
            f"{tensor_scale} that of the weights with which engines join it, expected one scale; "
            "give the model before it was quantized"
        )
    return q.unpack()


def _tensor_scale(members: Sequence[Any], encoding: Encoding) -> jax.Array:
    """The tensor scale that some weights share: that of the largest magnitude of all."""
    stored = [array.tensor_scale for array in members if is_qarray(array)]
    if stored and len(stored) == len(members):
        return stored[0]
    arrays = (array.dequantize() if is_qarray(array) else array for array in members)
    largest = functools.reduce(jnp.maximum, (amax(array) for array in arrays))
    return tensor_scales_from(largest, encoding.spec)


@functools.partial(jax.jit, static_argnames=("packings", "dtypes"))
def _stored_arrays(
    q: QArray, packings: tuple[Packing | None, Packing | None], dtypes: tuple[str, str, str]
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Codes, scales and zero points of a quantized array as a file has them."""
    element, scale, zeros = q.spec.element, q.scale, None
    packing, zero_packing = packings
    if packing is None:
        codes = _in_dtype(q.codes, dtypes[0], element)
    else:
        codes = words_of(q.codes, packing, element.bits).astype(NUMPY_DTYPES[dtypes[0]])
    if scale is not None:
        dtype = NUMPY_DTYPES[dtypes[1]]
        is_power = q.spec.scale == E8M0FNU and dtype == np.uint8
        scale = codes_from_dtype(scale, E8M0FNU) if is_power else scale.astype(dtype)
    if q.zero_point is not None and zero_packing is not None:
        words = pack_zero_points(q.zero_point, zero_packing, element.bits)
        zeros = words.astype(NUMPY_DTYPES[dtypes[2]])
    return codes, scale, zeros


def _in_dtype(codes: jax.Array, dtype: str, element: Any) -> jax.Array:
    array = dtype_from_codes(codes, element)
    assert array.dtype == NUMPY_DTYPES[dtype]
    return array
