"""`Source`, the one interface to read checkpoints of any container. No JAX here."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import numpy as np

from qtoolkit.checkpoints._header import TensorInfo
from qtoolkit.checkpoints._storage import Path
from qtoolkit.checkpoints._stored import Stored


class StoredAs(NamedTuple):
    """How a tensor lies in its file: the dtype of its codes or blocks; bytes, with its scales."""

    dtype: str
    nbytes: int


class Source:
    """An open checkpoint. Threads may read it at the same time. A context manager.

    Attributes:
      path: As given.
      tensors: Its tensors by name, in the order of the data; `start` and `stop` mean nothing here.
      metadata: The strings that it holds beside tensors.
      config: The content of its `config.json`; empty without one.
      layout: That of the tensors that are quantized, of which `tensors` has the values; "" where
        none is.
      stored_as: How these are stored, by name.
      stored: The same in full, but for GGUF, whose blocks no layout describes.
      beside: What loaders keep beside them, such as input scales; no tensors of the model.
    """

    path: Path
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    config: Mapping[str, Any] = {}
    layout: str = ""
    stored_as: Mapping[str, StoredAs] = {}
    stored: Mapping[str, Stored] = {}
    beside: Mapping[str, TensorInfo] = {}

    @property
    def everything(self) -> dict[str, TensorInfo]:
        """`tensors` and what is `beside` them."""
        return {**self.tensors, **self.beside}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError

    def read(self, name: str) -> np.ndarray:
        """The whole tensor `name`, a new array. Raises KeyError where there is none."""
        info = self.tensors[name]
        array = np.empty(info.shape, info.numpy_dtype)
        self.read_into(name, 0, array.reshape(-1).view(np.uint8).data)
        return array

    def read_into(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        """Fills `buffer` from byte `start` of tensor `name` on."""
        raise NotImplementedError

    def read_stored(self, name: str, start: int, buffer: memoryview) -> None:
        """Fills `buffer` from byte `start` of an entry of a stored weight on."""
        raise NotImplementedError
