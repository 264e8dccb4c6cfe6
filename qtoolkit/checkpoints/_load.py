"""`save`, `load` and `dequantize`: states of models with quantized arrays, in safetensors files.

A nested state is flattened, and keys are joined by dots: "layers.0.kernel". A `QArray` has an entry
for each of its arrays. Its codes have its own name, and the dtype of their format if safetensors
has it; the others are `<name>_scale`, `<name>_tensor_scale`, `<name>_zero_point` and
`<name>_factors`. JSON under `qtoolkit_arrays` in the metadata says how to dequantize them: a
format, lengths of blocks, a dtype, a packed size, a rotation. JAX is imported only if there are
quantized arrays.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from qtoolkit.checkpoints._codes import check_explained
from qtoolkit.checkpoints._containers import array_checkpoint, container_of, open_source
from qtoolkit.checkpoints._decode import comfy_marks, dequantized
from qtoolkit.checkpoints._pytrees import differs, filled, is_qarray, named_arrays
from qtoolkit.checkpoints._safetensors import write_arrays
from qtoolkit.checkpoints._storage import Path, check_path
from qtoolkit.checkpoints._tensors import (
    DTYPE_OF,
    FLOATS,
    Checkpoint,
    CheckpointError,
    Entry,
    shown,
)
from qtoolkit.checkpoints.layouts import LAYOUTS
from qtoolkit.checkpoints.layouts._qarrays import (
    ARRAYS_KEY,
    FACTORS,
    FIELDS,
    ROTATION,
    not_described,
)


def save(
    path: Path,
    tensors: Any,
    metadata: Mapping[str, str] | None = None,
    *,
    overwrite: bool = False,
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
                'write {"name": array}, or of a model of nnx nnx.state(model)'
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
    about = dict(metadata or {})
    description = json.dumps(quantized, sort_keys=True)
    if about.get(ARRAYS_KEY, description) != description:
        raise CheckpointError(
            f"{path}: metadata has {ARRAYS_KEY!r}, which describes the quantized arrays, expected "
            "another key; remove it"
        )
    if quantized:
        about[ARRAYS_KEY] = description
    write_arrays(path, arrays, about, overwrite=overwrite)


def load(path: Path, like: Any = None) -> Any:
    """Load the arrays and `QArray`s of a file, a folder or an orbax checkpoint.

        state = qtoolkit.checkpoints.load("model.safetensors", like=nnx.state(model))
        nnx.update(model, state)

    Args:
      path: A safetensors file, from `save`, `convert` or any other program; a folder as Hugging
        Face's, in any layout; or a checkpoint of orbax.
      like: A state with the structure of the result, such as `nnx.state(model)`, linen variables,
        or trees of `jax.ShapeDtypeStruct`. The file must have exactly the names that `save` would
        give it. A tensor that `convert` quantized becomes a `QArray`, even if `like` has a plain
        array there.

    Returns:
      Without `like`: a dictionary of NumPy arrays by name, in the order of the file, with a
      `QArray` for each one that was saved. Weights that `convert` quantized are `QArray`s if `path`
      is a folder, because its config says what codes mean; elements narrower than a byte are
      packed. If `path` is a file, codes and scales stay separate, for `dequantize`.
      With `like`: a tree with its structure, of JAX arrays and `QArray`s. Dtypes are those of the
      file. Shardings are those of the arrays or structs in `like`, if they have any; scales are
      then replicated on all devices.

    Raises:
      CheckpointError: The file is damaged, or holds elements of 6 bits; the weights of a folder are
        in a layout that cannot be read, or contradict its config; or the result differs from
        `like`: a name is missing or left over, or a shape or kind of dtype differs.
      OSError: The file cannot be read.

    Examples:
      >>> model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
      >>> qt.checkpoints.save("model.safetensors", nnx.state(model))
      >>> {name: array.shape for name, array in qt.checkpoints.load("model.safetensors").items()}
      {'bias': (2,), 'kernel': (4, 2)}
      >>> state = qt.checkpoints.load("model.safetensors", like=nnx.state(model))
      >>> bool((state["kernel"][...] == model.kernel[...]).all())
      True
    """
    kind = container_of(path)
    if kind == "gguf":
        raise CheckpointError(
            f"{path}: gguf, expected safetensors, a folder or a checkpoint of orbax; make a "
            "safetensors file of it with dequantize_checkpoint"
        )
    with open_source(path) as file:
        described = file.metadata.get(ARRAYS_KEY)
        if file.folder is not None and described is None:
            loaded = _of_folder(file, None if like is None else dict(named_arrays(path, like)))
        else:
            # What `dequantize` cannot see any more once there are only arrays.
            comfy_marks(file, {n for n, t in file.tensors.items() if t.dtype not in FLOATS})
            arrays: dict[str, Any] = {name: file.read(name) for name in file.tensors}
            loaded = _with_qarrays(path, arrays, described)
    if like is None:
        return loaded
    wanted = dict(named_arrays(path, like))
    for name in list(loaded) if kind == "orbax" else ():
        # A last key "value" was dropped, because orbax's trees use it for variables. Restore it.
        if f"{name}.value" in wanted and name not in wanted:
            ends = [end for end in ("", "_scale") if name + end in loaded]
            loaded |= {f"{name}.value{end}": loaded.pop(name + end) for end in ends}
    loaded = _with_converted(loaded, wanted)
    state = filled(path, like, loaded)
    if loaded:
        raise differs(
            path, loaded, "which `like` has not; add them to it, or remove them from the file"
        )
    return state


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
    about: dict[str, Any] = {
        "spec": spec,
        "dtype": str(array.dtype),
        "lengths": list(array.lengths),
        "packed_size": array.packed_size,
    }
    about |= {} if array.factors is None else {FACTORS: True}
    about |= {} if array.rotation is None else {ROTATION: list(array.rotation)}
    return entries, about


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


def _with_qarrays(path: Path, arrays: dict[str, Any], described: str | None) -> dict[str, Any]:
    """The arrays that `save` wrote, with those of each `QArray` put together."""
    if described is None:
        return arrays
    import jax.numpy as jnp

    from qtoolkit.products.internal import spec_from_json
    from qtoolkit.scaling import QArray

    result = dict(arrays)
    try:
        for name, about in json.loads(described).items():
            spec, size = spec_from_json(about["spec"]), about["packed_size"]
            names = (*FIELDS, FACTORS) if FACTORS in about else FIELDS
            fields = {field: result.pop(f"{name}_{field}", None) for field in names}
            codes = arrays[name].view(np.uint8 if size is not None else spec.element.code_dtype)
            result[name] = QArray(
                jnp.asarray(codes),
                spec=spec,
                dtype=about["dtype"],
                lengths=tuple(about["lengths"]),
                packed_size=size,
                rotation=tuple(about[ROTATION]) if ROTATION in about else None,
                **{field: None if x is None else jnp.asarray(x) for field, x in fields.items()},
            )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise not_described(path, error) from error
    return result


def _with_converted(arrays: dict[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays, with a `QArray` for each pair of 8-bit codes and float32 scales."""
    result = dict(arrays)

    def read(entry: Entry) -> np.ndarray:
        return np.ascontiguousarray(arrays[entry.name]).reshape(-1).view(np.uint8)

    for name, codes in arrays.items():
        scale: Any = arrays.get(f"{name}_scale")
        if not isinstance(codes, np.ndarray) or not isinstance(scale, np.ndarray):
            continue
        is_pair = codes.dtype.itemsize == 1 and scale.dtype == np.float32 and codes.size
        if not is_pair or name not in wanted or f"{name}_scale" in wanted:
            continue
        from qtoolkit.checkpoints._values import qarray_of  # loads JAX

        both = {name: codes, f"{name}_scale": scale}
        headers = {n: Entry(n, DTYPE_OF[x.dtype.name], x.shape) for n, x in both.items()}
        (encoding,) = LAYOUTS["plain"].decode({}, headers, "load").values()
        dtype = getattr(wanted[name], "dtype", np.dtype("float32"))
        result[name] = qarray_of(encoding, read, dtype=dtype)
        del result[f"{name}_scale"]
    return result


def _of_folder(folder: Checkpoint, wanted: Collection[str] | None) -> dict[str, Any]:
    """The tensors of a folder by name; quantized ones are `QArray`s, in any layout.

    Entries that only loaders need, such as input scales, are skipped unless they are `wanted`.
    """
    source = dequantized(folder)
    check_explained(source)
    loaded: dict[str, Any] = {}
    for name in source.everything if wanted is None else {*source.tensors, *wanted}:
        encoding = source.encodings.get(name)
        if encoding is None:
            loaded |= {name: folder.read(name)} if name in folder.tensors else {}
        elif encoding.is_array and (0 in encoding.shape or encoding.scale is None):
            loaded |= {e.name: folder.read(e.name) for e in encoding.entries}
        else:
            from qtoolkit.checkpoints._values import entry_reader, qarray_of, values_of  # loads JAX

            read = entry_reader(folder.tensors)
            if not encoding.is_array:
                loaded[name] = values_of(encoding, read)
                continue
            array = qarray_of(encoding, read)
            is_narrow = encoding.spec.element.bits in (1, 2, 4, 6)
            loaded[name] = array.pack() if is_narrow else array
    return loaded


def dequantize(tensors: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Dequantize tensors, as `convert` or other programs write them, to float32.

    Args:
      tensors: Arrays by name, as `load` returns them.

    Returns:
      The same dictionary with the float32 values of every `QArray`, and of every weight whose codes
      and scales have the names and dtypes of a known layout. The scales are removed.

    Raises:
      CheckpointError: Codes are in a layout that cannot be read.
      TypeError: `tensors` is no dictionary.

    Examples:
      >>> weights = {"w": jnp.asarray([[896.0, 0.3]]), "bias": jnp.ones(2)}
      >>> qt.checkpoints.save("model.safetensors", weights)
      >>> report = qt.checkpoints.convert("model.safetensors", "fp8.safetensors", scaling="tensor")
      >>> tensors = qt.checkpoints.load("fp8.safetensors")
      >>> tensors["w"].dtype, tensors["w_scale"]
      (dtype(float8_e4m3fn), array([2.], dtype=float32))
      >>> qt.checkpoints.dequantize(tensors)["w"]
      array([[8.960e+02, 3.125e-01]], dtype=float32)
    """
    if not isinstance(tensors, Mapping):
        raise TypeError(
            f"dequantize: tensors has type {type(tensors).__name__}, expected arrays by name; "
            "write dequantize(load(path))"
        )
    arrays = {
        name: np.asarray(tensor.dequantize("float32") if is_qarray(tensor) else tensor)
        for name, tensor in tensors.items()
    }
    known = {name: x for name, x in arrays.items() if x.dtype.name in DTYPE_OF}
    headers = {name: (x.dtype, x.shape) for name, x in known.items()}
    source = dequantized(array_checkpoint("dequantize", headers, known.__getitem__))
    check_explained(source, lambda name: not _has_scales(name, arrays))
    for name in arrays.keys() - known.keys():
        scales = [f"{name}{end}" for end in ("_scale", "_scale_inv") if f"{name}{end}" in arrays]
        if scales:
            raise CheckpointError(
                f"dequantize: tensor {shown(name)}: {arrays[name].dtype} with {shown(scales[0])}, "
                "which no layout explains, expected 8-bit or packed codes; load the folder, whose "
                "config.json may say it"
            )
    values = {n: t.read_all() if t.encoding else arrays[n] for n, t in source.everything.items()}
    return values | {name: x for name, x in arrays.items() if name not in known}


def _has_scales(name: str, names: Iterable[str]) -> bool:
    """Whether other tensors of its module, by their names, show that this one holds codes."""
    module = name.rpartition(".")[0]
    start = f"{module}." if module else name
    ends = (other.removeprefix(start) for other in names if other.startswith(start))
    return any(re.search("scale|zero|absmax|quant|SCB|codebook", end) for end in ends)
