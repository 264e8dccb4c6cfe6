"""What layouts decode: the headers of a checkpoint, and how to read its small tensors."""

from collections.abc import Callable, Collection, Mapping

import numpy as np

from qtoolkit.checkpoints._tensors import Entry

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
