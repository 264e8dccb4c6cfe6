"""`save`, `load` and `dequantize`: states of models with quantized arrays, in safetensors files.

A nested state is flattened, and keys are joined by dots: "layers.0.kernel". A `QArray` has an entry
for each of its arrays. Its codes have its own name, and the dtype of their format if safetensors
has it; the others are `<name>_scale`, `<name>_tensor_scale`, `<name>_zero_point` and
`<name>_factors`. JSON under `qtoolkit_arrays` in the metadata says how to dequantize them: a
format, lengths of blocks, a dtype, a packed size, a rotation. JAX is imported only if there are
quantized arrays.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from qtoolkit.checkpoints._checkpoint import Checkpoint, Tensor
from qtoolkit.checkpoints._checks import compile_patterns
from qtoolkit.checkpoints._containers import open_source
from qtoolkit.checkpoints._decode import check_explained, check_marks, decode_weights
from qtoolkit.checkpoints._formats import high_precision_dtype
from qtoolkit.checkpoints._pytrees import fill_tree, is_qarray, named_arrays, structure_error
from qtoolkit.checkpoints._safetensors import write_arrays
from qtoolkit.checkpoints._storage import Path, check_path
from qtoolkit.checkpoints._tensors import (
    DTYPE_OF,
    FLOATS,
    NUMPY_DTYPES,
    CheckpointError,
    listed,
    shown,
)
from qtoolkit.checkpoints.layouts._qarrays import (
    ARRAYS_KEY,
    FACTORS,
    FIELDS,
    ROTATION,
    not_described,
)
from qtoolkit.formats import FormatLike

# For a name in a tree its name in the checkpoint, with an order of axes, with the shape there.
Place = str | tuple[str, Sequence[int]] | tuple[str, Sequence[int], Sequence[int]]
Names = Mapping[str, Place] | Callable[[str], Place]
Reader = Callable[[Any], Any]


def save(
    path: Path, tensors: Any, metadata: Mapping[str, str] | None = None, *, overwrite: bool = False
) -> None:
    """Write arrays of NumPy or JAX, and quantized ones, to a safetensors file.

        qtoolkit.checkpoints.save("model.safetensors", nnx.state(model))

    The same arguments give the same bytes. `load` returns what was saved.

    Args:
      path: The file to write.
      tensors: Arrays and `QArray`s by name; or dictionaries, lists and tuples of them, such as
        `nnx.state(model)` or linen variables, whose keys are joined by dots. None is skipped.
      metadata: Strings for `__metadata__`.
      overwrite: Whether a file of that name may be replaced.

    Raises:
      CheckpointError: Something is no array, safetensors cannot hold a dtype or format, two arrays
        have the same name, or the target exists. Then nothing is written.
      OSError: The file cannot be written.

    Examples:
      >>> kernel = jax.random.normal(jax.random.key(0), (64, 32))
      >>> tensors = {"kernel": qt.quantize(kernel, "mxfp8_e4m3"), "bias": jnp.zeros(32)}
      >>> qt.checkpoints.save("model.safetensors", tensors)
      >>> qt.checkpoints.load("model.safetensors")["kernel"]
      QArray(mxfp8_e4m3, float32[64,32]: codes uint8[64,32], scale float8_e8m0fnu[64,1])
    """
    check_path(path, "path")  # before errors that name it: it may be the tensors
    arrays: dict[str, np.ndarray] = {}
    quantized: dict[str, Any] = {}
    for name, leaf in named_arrays(path, tensors):
        if not name:
            raise CheckpointError(
                f"{path}: what is saved has type {type(leaf).__name__}, expected arrays by name; "
                'write {"name": array}; of a model of nnx nnx.state(model, nnx.Param), of a '
                "TrainState its params"
            )
        entries = {name: leaf}
        if is_qarray(leaf):
            entries, quantized[name] = _entries(path, name, leaf)
        for entry, array in entries.items():
            if entry in arrays:
                raise CheckpointError(
                    f"{path}: tensor {shown(entry)}: two arrays of the state have this name, "
                    "expected one; rename one of them"
                )
            arrays[entry] = _array(path, entry, array)
    written = dict(metadata or {})
    description = json.dumps(quantized, sort_keys=True)
    if written.get(ARRAYS_KEY, description) != description:
        raise CheckpointError(
            f"{path}: metadata has {ARRAYS_KEY!r}, which describes the quantized arrays, expected "
            "another key; remove it"
        )
    if quantized:
        written[ARRAYS_KEY] = description
    write_arrays(path, arrays, written, overwrite=overwrite)


def load(
    path: Path,
    like: Any = None,
    *,
    dtype: FormatLike | None = None,
    names: Names | None = None,
    skip: Sequence[str] = (),
) -> Any:
    """Load the arrays and `QArray`s of a file, a folder or an orbax checkpoint.

        state = qtoolkit.checkpoints.load("model.safetensors", like=nnx.state(model))
        nnx.update(model, state)

    Args:
      path: A safetensors file, from `save`, `convert` or any other program; a folder as Hugging
        Face's, in any layout; a checkpoint of orbax; or GGUF, whose blocks become float32.
      like: A state with the structure of the result, such as `nnx.state(model)`, linen variables,
        or trees of `jax.ShapeDtypeStruct`. The file must have exactly the names that `save` would
        give it. A tensor that `convert` quantized becomes a `QArray`, even if `like` has a plain
        array there.
      dtype: float32, float16 or bfloat16: quantized weights are dequantized to it, and floats are
        rounded to it. None: they are loaded as they are.
      names: With `dtype` and `like`: the name in the checkpoint of each name in `like`, a table or
        a function of the name. It may give (name, axes) instead: the tensor is transposed by these
        axes, (1, 0) for a kernel of Flax, and takes the shape in `like`. A table need not have
        names that are the same in both.
      skip: With `like`: regular expressions; tensors of the checkpoint that have no place in `like`
        must match one, or loading fails.

    Returns:
      Without `like`: a dictionary by name, in the order of the file, with a `QArray` for each
      quantized weight and a NumPy array for each other tensor. Elements narrower than a byte are
      packed. Weights with reordered groups (GPTQ's act-order) are float32, as no `QArray` has such.
      With `like`: a tree with its structure, of JAX arrays and `QArray`s. Shardings are those of
      the arrays or structs in `like`, if they have any; scales are then replicated on all devices.
      One weight after the other is read, so that the host holds one and its shards.

    Raises:
      CheckpointError: The file is damaged, or holds elements of 6 bits; the weights of a folder are
        in a layout that cannot be read, or contradict its config; or the result differs from
        `like`: a name is missing or left over, or a shape or kind of dtype differs.
      OSError: The file cannot be read.
      TypeError: `names` without `dtype`, or `names` or `skip` without `like`.

    Examples:
      >>> model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
      >>> qt.checkpoints.save("model.safetensors", nnx.state(model))
      >>> {name: array.shape for name, array in qt.checkpoints.load("model.safetensors").items()}
      {'bias': (2,), 'kernel': (4, 2)}
      >>> state = qt.checkpoints.load("model.safetensors", like=nnx.state(model))
      >>> bool((state["kernel"][...] == model.kernel[...]).all())
      True
    """
    if like is None and (names is not None or skip):
        raise TypeError("load: names or skip without like, expected a state to load into; give it")
    if names is not None and dtype is None:
        raise TypeError(
            "load: names without dtype, expected both, because codes are not transposed; write "
            "dtype=jnp.bfloat16"
        )
    number = None if dtype is None else NUMPY_DTYPES[high_precision_dtype(dtype)]
    with open_source(path) as file:
        readers, auxiliary = _readers(file, number)
        if like is None:
            return {name: read("float32") for name, read in readers.items()}
        wanted = dict(named_arrays(path, like))
        if names is None:
            _check_level(path, wanted, readers)
        placed, used = _readers_by_leaf(readers, wanted, names)
        state = fill_tree(path, like, placed)
        patterns = compile_patterns(skip)
        unused = [n for n in readers if n not in used and n not in auxiliary]
        if unused := [n for n in unused if not any(p.search(n) for p in patterns)]:
            raise structure_error(
                path,
                unused,
                "which `like` has not; add them to it, or name them in skip=, a list of patterns",
            )
    return state


def _check_level(path: Path, wanted: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    """Raises if the file has what is wanted one level deeper, as a training state has it, or one
    level higher.
    """
    name = next((name for name in wanted if name not in stored), None)
    if name is None:
        return
    first, _, inner = name.partition(".")
    if inner in stored:
        raise CheckpointError(
            f"{path}: has no tensor {shown(name)}, but {shown(inner)}; give what is in "
            f"like[{first!r}]"
        )
    outer = {other.removesuffix(f".{name}") for other in stored if other.endswith(f".{name}")}
    key = outer.pop() if len(outer) == 1 else "."
    if "." not in key:
        others = sorted({other.partition(".")[0] for other in stored} - {key})
        also = f'; the file also has {listed(others, 3)}: add that, or skip=["^(?!{key}[.])"]'
        raise CheckpointError(
            f"{path}: has no tensor {shown(name)}, but {shown(f'{key}.{name}')}; write "
            f'like={{"{key}": ...}} around yours{also if others else ""}'
        )


def _readers_by_leaf(
    readers: Mapping[str, Reader], wanted: Mapping[str, Any], names: Names | None
) -> tuple[dict[str, Callable[[], Any]], set[str]]:
    """For each name in `like` what reads its array; and the names in the checkpoint."""
    placed: dict[str, Callable[[], Any]] = {}
    used = set()
    for leaf, like in wanted.items():
        name, axes = leaf, None
        if names is not None:
            found = names(leaf) if callable(names) else names.get(leaf, leaf)
            name, axes = (found, None) if isinstance(found, str) else found[:2]
        elif leaf not in readers and leaf.endswith(".value"):
            name = leaf.removesuffix(".value")  # orbax's last key of variables was dropped
        if name in readers:
            shape = None if names is None else getattr(like, "shape", None)
            kind = getattr(like, "dtype", np.dtype("float32"))
            placed[leaf] = functools.partial(_arrange, readers[name], kind, axes, shape)
            used.add(name)
    return placed, used


def _arrange(
    read: Reader, dtype: Any, axes: Sequence[int] | None, shape: tuple[int, ...] | None
) -> Any:
    """An array, with axes in another order; of another rank, in the shape of the same size."""
    array = read(dtype)
    if axes is not None and len(axes) == array.ndim:
        array = array.transpose(axes)
    if shape is None or len(shape) == array.ndim or array.size != math.prod(shape):
        return array  # of another shape it is refused later
    return array.reshape(shape)


def _readers(file: Checkpoint, dtype: np.dtype | None) -> tuple[dict[str, Reader], set[str]]:
    """What reads each array of an open checkpoint, by name, in its order.

    A reader takes the dtype that a `QArray` has; it gives numbers of `dtype`, if that is not None.
    The second result are the names of what only loaders need, such as input scales.
    """
    saved = _saved_descriptions(file)
    parts = {f"{name}_{field}" for name in saved for field in (*FIELDS, FACTORS)}
    others = {n: t for n, t in file.tensors.items() if n not in saved and n not in parts}
    # Codes that no layout finds become arrays: what programs say of them would be lost.
    check_marks(file, {name for name, tensor in others.items() if tensor.dtype not in FLOATS})
    rest = dataclasses.replace(file, tensors=others)
    rest.metadata = {key: text for key, text in file.metadata.items() if key != ARRAYS_KEY}
    source = decode_weights(rest)
    check_explained(source)
    readers: dict[str, Reader] = {}
    for name, tensor in source.all_tensors.items():
        readers[name] = functools.partial(_read, tensor, dtype)
    for name, description in saved.items():
        readers[name] = functools.partial(_read_saved, file, name, description, dtype)
    order = {name: place for place, name in enumerate(file.tensors)}
    order |= {encoding.name: order[encoding.codes.name] for encoding in source.encodings.values()}
    return dict(sorted(readers.items(), key=lambda pair: order.get(pair[0], 0))), {
        *source.auxiliary
    }


def _read(tensor: Tensor, dtype: np.dtype | None, kind: Any) -> Any:
    if dtype is None and tensor.encoding is not None:
        return tensor.weight.array(kind)
    array = tensor.read_all()
    return array.astype(dtype, copy=False) if dtype and tensor.dtype in FLOATS else array


def _read_saved(
    file: Checkpoint, name: str, description: Any, dtype: np.dtype | None, _: Any
) -> Any:
    array = _saved_array(file, name, description)
    return array if dtype is None else np.asarray(array.dequantize(dtype))


def _entries(path: Path, name: str, array: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The entries of a `QArray`, and what describes it."""
    from qtoolkit.products.internal import spec_to_json

    try:
        spec = spec_to_json(array.spec)
    except TypeError as error:
        raise CheckpointError(
            f"{path}: tensor {shown(name)}: {error}; dequantize() it, or use a published format"
        ) from error
    codes = np.asarray(array.codes)
    dtype = array.spec.element.dtype
    is_known = dtype is not None and dtype.name in DTYPE_OF and dtype.itemsize == codes.itemsize
    if array.packed_size is None and is_known:
        codes = codes.view(dtype)
    entries = {name: codes}
    for field in (*FIELDS, FACTORS):
        if getattr(array, field) is not None:
            entries[f"{name}_{field}"] = getattr(array, field)
    description: dict[str, Any] = {
        "spec": spec,
        "dtype": str(array.dtype),
        "lengths": list(array.lengths),
        "packed_size": array.packed_size,
    }
    description |= {} if array.factors is None else {FACTORS: True}
    description |= {} if array.rotation is None else {ROTATION: list(array.rotation)}
    return entries, description


def _array(path: Path, name: str, x: Any) -> np.ndarray:
    dtype = getattr(x, "dtype", None)
    where = f"{path}: tensor {shown(name)}"
    if dtype is None and not isinstance(x, int | float | bool | np.generic):
        raise CheckpointError(
            f"{where} has type {type(x).__name__}, expected an array, a QArray, or a dictionary, "
            "list or tuple of such; pass the arrays alone, e.g. nnx.state(model) or state.params"
        )
    if "key<" in str(dtype):
        raise CheckpointError(
            f"{where} is a key of jax.random, expected an array; store jax.random.key_data(key), "
            "or exclude it, e.g. with nnx.state(model, nnx.Param)"
        )
    try:
        return np.asarray(x)
    except (TypeError, RuntimeError) as error:  # of PyTorch: a bfloat16 tensor, or a gradient's
        from qtoolkit.casts.internal import hint_for_others

        raise CheckpointError(f"{where}: {error}{hint_for_others('x', x)}") from error


def _saved_descriptions(file: Checkpoint) -> dict[str, Any]:
    """What the metadata says of the `QArray`s that `save` wrote, by name."""
    try:
        return {**json.loads(file.metadata.get(ARRAYS_KEY, "{}"))}
    except (ValueError, TypeError, RecursionError) as error:
        raise not_described(file.path, error) from error


def _saved_array(file: Checkpoint, name: str, description: Any) -> Any:
    """A `QArray` that `save` wrote, as the metadata describes it."""
    import jax.numpy as jnp

    from qtoolkit.products.internal import spec_from_json
    from qtoolkit.scaling import QArray

    try:
        spec, size = spec_from_json(description["spec"]), description["packed_size"]
        names = (*FIELDS, FACTORS) if FACTORS in description else FIELDS
        fields = {n: f"{name}_{n}" for n in names if f"{name}_{n}" in file.tensors}
        codes = file.read(name).view(np.uint8 if size is not None else spec.element.code_dtype)
        return QArray(
            jnp.asarray(codes),
            **({"scale": None} | {n: jnp.asarray(file.read(entry)) for n, entry in fields.items()}),
            spec=spec,
            dtype=description["dtype"],
            lengths=tuple(description["lengths"]),
            packed_size=size,
            rotation=tuple(description[ROTATION]) if ROTATION in description else None,
        )
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise not_described(file.path, error) from error


def dequantize(tree: Any, dtype: Any = "float32") -> Any:
    """A tree, such as `load` returns, with the numbers of each `QArray` in its place.

    Args:
      tree: Any pytree; arrays in it stay as they are.
      dtype: As in `QArray.dequantize`.

    Examples:
      >>> weights = {"w": jnp.asarray([[896.0, 0.3]]), "bias": jnp.ones(2)}
      >>> qt.checkpoints.save("model.safetensors", weights)
      >>> report = qt.checkpoints.convert("model.safetensors", "fp8.safetensors", scaling="tensor")
      >>> tensors = qt.checkpoints.load("fp8.safetensors")
      >>> tensors["w"]
      QArray(e4m3fn by tensor, float32[1,2]: codes uint8[1,2], scale float32[1,1])
      >>> qt.checkpoints.dequantize(tensors)["w"]
      Array([[8.960e+02, 3.125e-01]], dtype=float32)
    """
    import jax

    return jax.tree.map(
        lambda x: x.dequantize(dtype) if is_qarray(x) else x, tree, is_leaf=is_qarray
    )
