"""What layouts decode: the headers of a checkpoint, checks of them, and its small tensors."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from qtoolkit.checkpoints._tensors import CheckpointError, Entry, shown

Headers = Mapping[str, Entry]  # the tensors of a checkpoint by name, as headers announce them


class OpenHeaders(dict[str, Entry]):
    """`Headers` of an open checkpoint, with the metadata and a function that reads a tensor.

    For layouts that write down in small tensors, or in the metadata, what others have in
    config.json: shapes, lengths of blocks, the order of codes.
    """

    def __init__(
        self, headers: Headers, metadata: Mapping[str, str], read: Callable[[str], np.ndarray]
    ) -> None:
        super().__init__(headers)
        self.metadata, self.read = metadata, read

    def without(self, names: Collection[str]) -> "OpenHeaders":
        others = {name: entry for name, entry in self.items() if name not in names}
        return OpenHeaders(others, self.metadata, self.read)


def entry_beside(name: str, suffix: str) -> str:
    """The name of an entry of the same module: "a.weight_scale" of "a.weight"."""
    return f"{name.rsplit('.', 1)[0]}.{suffix}" if "." in name else suffix


_MAKER = "the program that made it"


def entry_error(where: str, entry: str, problem: str, program: str = _MAKER) -> CheckpointError:
    """The error for an entry that differs from what its layout says."""
    message = f"tensor {shown(entry)}: {problem}"
    return CheckpointError(f"{where}: {message}; dequantize the checkpoint with {program}")


def config_error(
    where: str, key: str, value: Any, expected: str, program: str = _MAKER
) -> CheckpointError:
    """The error for a value in the quantization config that cannot be read."""
    message = f"{key} {shown(str(value)[:80])} in config.json, expected {expected}"
    return CheckpointError(f"{where}: {message}; dequantize the checkpoint with {program}")


def check_entry(headers: Headers, name: str, dtypes: tuple[str, ...], where: str) -> Entry:
    """The entry `name` of a checkpoint; raises where it is missing or has none of `dtypes`."""
    entry = headers.get(name)
    expected = f"expected {' or '.join(dtypes)}"
    if entry is None:
        raise CheckpointError(
            f"{where}: tensor {shown(name)}: no such tensor, {expected}; fetch the checkpoint again"
        )
    if entry.dtype not in dtypes:
        raise entry_error(where, name, f"dtype {entry.dtype}, {expected}")
    return entry


def check_block(block: Any, key: str, where: str) -> Sequence[int] | None:
    """Check the lengths of a block in a config; None if there are none."""
    if block is not None and not (
        isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    ):
        raise config_error(where, key, block, "two lengths, [128, 128]")
    return block
