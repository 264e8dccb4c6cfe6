"""`Headers`, what layouts decode: entries of a checkpoint, checks of them, small tensors."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from qtoolkit.checkpoints._tensors import CheckpointError, Entry, shown

_MAKER = "the program that made it"


class Headers(dict[str, Entry]):
    """The tensors of a checkpoint by name, as headers announce them.

    Attributes:
      path: The checkpoint's, for messages.
      metadata: Its texts.
      read: Reads a tensor. Some layouts write down in small tensors, or in the metadata, what
        others have in config.json: shapes, lengths of blocks, the order of codes.
    """

    def __init__(
        self,
        entries: Mapping[str, Entry],
        path: object,
        metadata: Mapping[str, str],
        read: Callable[[str], np.ndarray],
    ) -> None:
        super().__init__(entries)
        self.path, self.metadata, self.read = path, metadata, read

    def only(self, entries: Mapping[str, Entry]) -> "Headers":
        """The same checkpoint as if it had no other entries than these."""
        return Headers(entries, self.path, self.metadata, self.read)

    def check(self, name: str, dtypes: tuple[str, ...]) -> Entry:
        """The entry of a name; raises where it is missing or has none of `dtypes`."""
        entry, expected = self.get(name), f"expected {' or '.join(dtypes)}"
        if entry is None:
            raise CheckpointError(
                f"{self.path}: tensor {shown(name)}: no such tensor, {expected}; fetch the "
                "checkpoint again"
            )
        if entry.dtype not in dtypes:
            raise self.error(name, f"dtype {entry.dtype}, {expected}")
        return entry

    def check_block(self, block: Any, key: str) -> Sequence[int] | None:
        """The lengths of a block in the config; None if there are none."""
        if block is not None and not (
            isinstance(block, list)
            and len(block) == 2
            and all(type(n) is int and n > 0 for n in block)
        ):
            raise self.config_error(key, block, "two lengths, [128, 128]")
        return block

    def error(self, entry: str, problem: str, program: str = _MAKER) -> CheckpointError:
        """The error for an entry that differs from what its layout says."""
        message = f"tensor {shown(entry)}: {problem}"
        return CheckpointError(f"{self.path}: {message}; dequantize the checkpoint with {program}")

    def config_error(
        self, key: str, value: Any, expected: str, program: str = _MAKER
    ) -> CheckpointError:
        """The error for a value in the quantization config that cannot be read."""
        message = f"{key} {shown(str(value)[:80])} in config.json, expected {expected}"
        return CheckpointError(f"{self.path}: {message}; dequantize the checkpoint with {program}")


def entry_beside(name: str, suffix: str) -> str:
    """The name of an entry of the same module: "a.weight_scale" of "a.weight"."""
    return f"{name.rsplit('.', 1)[0]}.{suffix}" if "." in name else suffix
