"""`convert` and `dequantize_checkpoint`: open a source, plan, quantize, write."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from qtoolkit.checkpoints._arguments import InputScales, PlanOptions
from qtoolkit.checkpoints._checkpoint import Checkpoint
from qtoolkit.checkpoints._containers import open_source
from qtoolkit.checkpoints._decode import decode_quantized, decode_weights
from qtoolkit.checkpoints._gguf_write import check_container, plan_for, write_gguf
from qtoolkit.checkpoints._produce import Production, Workers
from qtoolkit.checkpoints._report import Plan, Progress, Report, TensorReport
from qtoolkit.checkpoints._roles import AxisChoice
from qtoolkit.checkpoints._safetensors import write_safetensors
from qtoolkit.checkpoints._shards import write_folder
from qtoolkit.checkpoints._storage import Path
from qtoolkit.checkpoints._target import Destination, Shard, check_shard, file_limit, worker_count
from qtoolkit.checkpoints._tensors import CheckpointError, listed, shown
from qtoolkit.formats import FormatLike, Rules, SpecLike

_NAMED = 20  # tensors with NaN or Inf that are named


def convert(
    src: Path,
    dst: Path,
    *,
    format: SpecLike | Rules[Any] = "e4m3fn",
    scaling: str | None = None,
    layout: str | None = None,
    skip: Sequence[str] = (),
    keep_dtype: FormatLike | None = None,
    channel_axis: AxisChoice = "auto",
    input_scales: InputScales | None = None,
    allow_split: bool = False,
    keep_unfitting: bool = False,
    max_shard_size: int | str | None = None,
    allow_nonfinite: bool = False,
    allow_codes: bool = False,
    overwrite: bool = False,
    shard: Shard | None = None,
    workers: int | None = None,
    max_memory: int | str | None = None,
    progress: Progress | None = None,
) -> Report:
    """Quantize the weights of a checkpoint and write them to another one, slab by slab.

    A folder becomes a folder, with index, config.json and the other files in it (`Report.left`
    names what is not copied). A file or a checkpoint of orbax becomes a safetensors file. Codes and
    scales are those of `qtoolkit.quantize`, rounded to nearest even, saturating. Weights that are
    quantized in the source are dequantized first. The same arguments give the same bytes.

    Args:
      src: A folder as Hugging Face's or orbax's, or a file: safetensors, GGUF.
        Folders of the first kind and safetensors files may also be URLs, such as
        "s3://bucket/model", which fsspec reads.
      dst: The folder or file to write, or a URL; not `src`. It appears when it is complete. In a
        folder behind a URL each file appears when it is complete, config.json last. A name that
        ends with .gguf: a file for llama.cpp, of a folder with a language model of Llama, Qwen or
        Gemma and its tokenizer; `format` is then "q8_0", "q4_0", "q4_1", "float16", "bfloat16",
        "mxfp4" or "nvfp4"; weights in `skip` keep their dtype, and arguments that GGUF has no use
        for are refused.
      format: An element format or a published block format, in any spelling, that the layout holds,
        or the name of one of its schemes, such as "W4A16". It is for float32, float16 and bfloat16
        tensors of two or more dimensions whose names match neither `DEFAULT_SKIP` nor `skip`.
        Or `Rules`, which give such a format, or None for what is not quantized, for the name of a
        tensor. `DEFAULT_SKIP` and the number of dimensions do not count then; the default of the
        rules is for float32, float16 and bfloat16.
      scaling: "tensor": one scale; "channel": one for each output; "block": one for 128x128
        elements, but one for each output in convolutions [O, I, kh, kw]. None: what the layout
        has first for the format. Formats without scales, bfloat16 and float16, and block formats
        take None alone.
      layout: How codes and scales are stored; `qtoolkit layouts` lists the names. None:
        "compressed-tensors" for a folder with a config.json, if that layout holds the format and
        the model is not of diffusers; else the only one that holds the format, if weights are named
        NAME.weight; else "plain".
      skip: Regular expressions; a tensor is not quantized if one is found in its name.
      keep_dtype: float32, float16 or bfloat16, to which tensors of these dtypes are rounded if they
        are not quantized; None: they are copied.
      channel_axis: Which axis of weights holds the outputs: "first", "last", or "auto", which
        decides by architecture, names and biases.
      input_scales: Static activation scales by module, or one for all, if the layout asks for them.
      allow_codes: Whether tensors may be copied that may hold codes: 8-bit floats, integers that
        are no masks or tables by their names, and scales without codes. `skip` and rules that
        name them allow them, too.
      allow_split: Whether layers that engines join, such as q, k and v, gate and up, or the experts
        of a layer, may have several schemes, or some of them none.
      keep_unfitting: Whether weights that whole blocks do not fill are not quantized. Otherwise
        they are an error.
      max_shard_size: The most bytes of a file of a folder, a number or text; None: "5GB".
      allow_nonfinite: Whether weights with NaN or Inf may be quantized and cast. Tensors that are
        copied may always have them, as masks do. Inf saturates, but stays Inf in float16 and
        bfloat16. NaN stays NaN where the format has one; in int8 and FP4 its scale, hence its
        whole block, becomes NaN.
      overwrite: Whether `dst` may be replaced.
      shard: (index, count), index from 0 on: which part of the files of a folder is written, for
        instance `(jax.process_index(), jax.process_count())`. Each process is given the same other
        arguments; then `finalize(dst)` makes the checkpoint. A rerun writes missing files alone.
      workers: Threads that read and quantize, each with some 20 MiB; None: one for each core, at
        most 4. The bytes do not depend on their number.
      max_memory: Bytes that the process may take, a number or text such as "400MB". Fewer workers
        are started where an estimate is larger: 340 MiB for Python, JAX and compiled programs on a
        CPU, and 20 MiB for each worker; hence at least "360MiB". Arrays that are read whole come on
        top: the largest array of orbax, the largest array of GGUF's blocks as float32, and for a
        GGUF of Llama the largest of q and k.
      progress: Called with (name, bytes written, bytes to write in all).

    Returns:
      What was done to each tensor.

    Raises:
      CheckpointError: `src` is no checkpoint or damaged, `dst` exists or is `src`, weights that are
        quantized or cast have NaN or Inf, `shard` or `max_shard_size` is given for a target that is
        no folder of files. The layout cannot hold the format or one of the tensors; scaling or
        input scales are given to formats that have none; the source is a folder of an adapter, or
        one that loaders would misread for lack of a config.json; a weight is float64; the name for
        its scales is taken; a regular expression is invalid, or it or a rule matches nothing; the
        axis of the outputs cannot be found out. Nothing is written then; of a shard only complete
        files.
      OSError: A file cannot be opened, read or written; it names the file.
      TypeError, ValueError: Unknown format, scaling or layout; a rule has a class as its key;
        `max_shard_size`, `shard`, `workers` or `max_memory` is out of range.

    Examples:
      >>> qt.checkpoints.save("model.safetensors", {"w": jnp.ones((64, 32)), "bias": jnp.ones(32)})
      >>> report = qt.checkpoints.convert("model.safetensors", "fp8.safetensors", scaling="tensor")
      >>> for tensor in report.tensors:
      ...     print(tensor.name, tensor.dtype, tensor.bytes_before, tensor.bytes_after)
      bias F32 128 128
      w F8_E4M3 8192 2052
      >>> qt.checkpoints.load("fp8.safetensors")["w"].spec.name
      'e4m3fn by tensor'
    """
    if format is None:  # of a plan it asks to quantize nothing: a copy would look converted
        raise TypeError(
            "convert: format=None, expected a format such as 'e4m3fn', or Rules; "
            "dequantize_checkpoint writes unquantized weights"
        )
    check_container(format, dst)
    destination = Destination(
        src=src, dst=dst, max_shard_size=max_shard_size, overwrite=overwrite, shard=shard
    )
    options = PlanOptions(
        format=format,
        scaling=scaling,
        layout=layout,
        skip=skip,
        keep_dtype=keep_dtype,
        channel_axis=channel_axis,
        input_scales=input_scales,
        allow_codes=allow_codes,
        allow_split=allow_split,
        keep_unfitting=keep_unfitting,
    )
    threads = workers, max_memory
    return _convert(destination, decode_weights, options, allow_nonfinite, threads, progress)


def dequantize_checkpoint(
    src: Path,
    dst: Path,
    *,
    dtype: FormatLike | None = None,
    max_shard_size: int | str | None = None,
    allow_codes: bool = False,
    overwrite: bool = False,
    shard: Shard | None = None,
    workers: int | None = None,
    max_memory: int | str | None = None,
    progress: Progress | None = None,
) -> Report:
    """Dequantize a checkpoint and write its weights to another one, slab by slab.

    Args:
      src, dst: As in `convert`. GGUF is quantized, too.
      max_shard_size, allow_codes, overwrite, shard, workers, max_memory, progress: As in
        `convert`.
      dtype: float32, float16 or bfloat16, for all weights. None: for those that were quantized
        the one that config.json names, else float32; the others are not cast.

    Returns:
      What was done to each tensor.

    Raises:
      CheckpointError: Nothing in `src` is quantized; or as `convert`.
      OSError, ValueError, TypeError: As `convert`.

    Examples:
      >>> qt.checkpoints.save("model.safetensors", {"w": jnp.asarray([[896.0, 0.3]])})
      >>> report = qt.checkpoints.convert("model.safetensors", "fp8.safetensors", scaling="tensor")
      >>> report = qt.checkpoints.dequantize_checkpoint("fp8.safetensors", "f32.safetensors")
      >>> qt.checkpoints.load("f32.safetensors")
      {'w': array([[8.960e+02, 3.125e-01]], dtype=float32)}
    """
    destination = Destination(
        src=src, dst=dst, max_shard_size=max_shard_size, overwrite=overwrite, shard=shard
    )
    options = PlanOptions(format=None, keep_dtype=dtype, allow_codes=allow_codes)
    threads = workers, max_memory
    return _convert(destination, decode_quantized, options, True, threads, progress)


def _convert(
    destination: Destination,
    decode: Callable[[Checkpoint], Checkpoint],
    options: PlanOptions,
    allow_nonfinite: bool,
    threads: tuple[int | None, int | str | None],
    progress: Progress | None,
) -> Report:
    """`threads` are the arguments of `worker_count`."""
    file_limit(destination.max_shard_size)
    check_shard(destination.shard)
    count = worker_count(*threads)
    if progress is not None and not callable(progress):
        raise TypeError(
            f"progress={progress!r}, expected a function of (name, bytes written, bytes to write "
            "in all), or None"
        )
    destination.check()
    with open_source(destination.src) as opened, Workers(count) as workers:
        source = decode(opened)
        plan = plan_for(destination.dst, source, options)
        production = Production(plan.tensors, workers, progress)
        return _write(destination, source, plan, production, allow_nonfinite)


def _write(
    destination: Destination,
    source: Checkpoint,
    plan: Plan,
    production: Production,
    allow_nonfinite: bool,
) -> Report:
    report = plan.report(source.path, destination.dst, (), _not_written(source, plan))
    error_of = functools.partial(_nonfinite_error, source, allow_nonfinite)
    if source.folder is not None and plan.header is None:
        return write_folder(destination, source, plan, production, report, error_of)
    production.total = sum(tensor.nbytes for tensor in plan.tensors)

    def chunks() -> Iterator[tuple[str, Any]]:
        # The error comes after the last chunk, when all bad tensors are known, and before the file
        # gets its name.
        yield from production.chunks(plan.tensors)
        if error := error_of(production.reports):
            raise error

    dst, overwrite = destination.dst, destination.overwrite
    if plan.header is not None:
        write_gguf(dst, plan.header, chunks(), overwrite=overwrite)
    else:
        write_safetensors(dst, plan.outputs, chunks(), plan.metadata, overwrite=overwrite)
    return dataclasses.replace(report, tensors=tuple(production.reports))


def _nonfinite_error(
    source: Checkpoint, allow_nonfinite: bool, reports: Sequence[TensorReport]
) -> CheckpointError | None:
    """The error for weights that had NaN or Inf and may not."""
    bad = [r for r in reports if r.nonfinite and r.action != "keep"]
    if allow_nonfinite or not bad:
        return None
    named = listed((f"{shown(r.name)} ({r.nonfinite:,})" for r in bad), _NAMED)
    casts = " and without keep_dtype=" if any(r.action == "cast" for r in bad) else ""
    return CheckpointError(
        f"{source.path}: NaN or Inf in weights: {named}; expected finite numbers; "
        f"copy them as they are, with skip={casts}, or pass allow_nonfinite=True"
    )


def _not_written(source: Checkpoint, plan: Plan) -> tuple[str, ...]:
    """What of a source does not go with the weights: files of a folder, and scales of activations
    and caches, which belonged to the codes that are gone.
    """
    written = {entry.name for tensor in plan.tensors for entry in tensor.entries}
    scales = [name for name in source.auxiliary if name not in written]
    return (*(() if source.folder is None else source.folder.not_copied), *scales)
