"""Checks a converted checkpoint: quantizes its source again and compares the bytes."""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import numpy as np

from qtoolkit.checkpoints._base import Source
from qtoolkit.checkpoints._batches import all_quantized
from qtoolkit.checkpoints._beside import problems_beside
from qtoolkit.checkpoints._compare import opened
from qtoolkit.checkpoints._engine import Sums, quantized
from qtoolkit.checkpoints._header import NUMPY_DTYPES, TensorInfo, shown
from qtoolkit.checkpoints._report import Progress, followed
from qtoolkit.checkpoints._storage import Path, check_path
from qtoolkit.checkpoints._stored import Stored, Values
from qtoolkit.checkpoints._work import copied, entries, reader, shared_amax, tasks_of
from qtoolkit.checkpoints.layouts import LAYOUTS
from qtoolkit.checkpoints.layouts._layout import WIDE
from qtoolkit.formats import DEEPSEEK_128X128, E4M3FN, FLOAT32, BlockFormat
from qtoolkit.formats import format as resolve


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verification:
    """What `verify` found.

    Attributes:
      source, converted: The two paths.
      tensors, quantized: How many tensors were compared, and how many of them are quantized.
      problems: A line for each difference; empty where all is as it should be.
    """

    source: str
    converted: str
    tensors: int
    quantized: int
    problems: tuple[str, ...]


def verify(src: Path, converted: Path, *, progress: Progress | None = None) -> Verification:
    """Quantizes `src` again as `converted` is quantized, and compares every code and scale.

    Headers and index are checked as they are opened. Each tensor of `src` must be there: unchanged,
    rounded to another wide dtype, or quantized, its codes and scales being those of
    `qtoolkit.quantize`, in layout compressed-tensors by that package's rules of scales. Static
    input scales must be there if the config says so, and be finite and above 0; what numbers the
    calibration gave cannot be checked. If `convert` wrote the checkpoint, config.json and
    hf_quant_config.json must say of quantization what it writes for these weights. If another
    program did, config.json must only say that weights are quantized, and must not list one of
    these by name as ignored. Other files are not compared. Nothing is written; memory is a few
    chunks.

    Args:
      src: The checkpoint that was converted: a folder or a file.
      converted: The result, of any program that quantizes in one of the layouts.
      progress: Called with (name, bytes compared, bytes in all) of `src`.

    Returns:
      What was compared, and a line for each difference.

    Raises:
      CheckpointError: One of them is no checkpoint, or damaged.
      OSError: A file cannot be read; it names the file.

    Examples:
      >>> qt.checkpoints.save("model.safetensors", {"w": jnp.ones((64, 32))})
      >>> qt.checkpoints.save("other.safetensors", {"w": jnp.zeros((64, 32))})
      >>> report = qt.checkpoints.convert("model.safetensors", "fp8.safetensors", scaling="tensor")
      >>> qt.checkpoints.verify("model.safetensors", "fp8.safetensors").problems
      ()
      >>> qt.checkpoints.verify("other.safetensors", "fp8.safetensors").problems
      ('w: byte 0 is 126, expected 0; convert it again',)
    """
    check_path(src, "src")
    check_path(converted, "converted")
    with opened(src) as source, opened(converted) as target:
        check = _Check(source, target)
        for info in followed(source.tensors.values(), progress):
            check.tensor(info)
        problems = [*problems_beside(source, target), *check.problems] + [
            f"{shown(name)}: is not in {shown(str(src))}"
            for name in target.tensors
            if name not in source.tensors
        ]
        return Verification(
            source=str(src),
            converted=str(converted),
            tensors=sum(name in check.everything for name in source.tensors),
            quantized=len(check.stored),
            problems=tuple(problems),
        )


class _Check:
    """A comparison under way."""

    def __init__(self, source: Source, target: Source) -> None:
        self.problems: list[str] = []
        self.stored = {n: w for n, w in target.stored.items() if n in source.tensors}
        self._source, self._target = source, target
        self.everything = target.everything
        self._seconds: dict[str, bytes] = {}
        self._amaxes: dict[bytes, float] = {}
        for name, weight in self.stored.items():
            if weight.second is not None:
                data = bytearray(weight.second.nbytes)
                target.read_stored(weight.second.name, 0, memoryview(data))
                self._seconds[name] = bytes(data)

    def tensor(self, info: TensorInfo) -> None:
        """Compares a tensor of the source; at most one problem of it is named."""
        name, found = info.name, self.everything.get(info.name)
        if found is None or found.shape != info.shape:
            got = "is missing" if found is None else f"shape {list(found.shape)}"
            self._problem(name, f"{got}, expected shape {list(info.shape)}")
        elif 0 in info.shape:
            pass  # no elements: there is nothing that its scales could change
        elif name in self.stored:
            stored = self._written(name)
            amax = functools.partial(self._shared_amax, name)
            tasks = tasks_of(self._source, info, stored, amax)
            again = entries(stored, all_quantized(tasks), Sums())
            self._differences(name, again, self._target.read_stored)
        elif found.dtype == info.dtype:
            self._differences(name, copied(self._source, info), self._target.read_into)
        elif info.dtype in WIDE and found.dtype in WIDE:
            self._differences(name, self._rounded(info, found.dtype), self._target.read_into)
        else:
            self._problem(name, f"dtype {found.dtype}, expected {info.dtype}")

    def _written(self, name: str) -> Stored:
        """The `Stored` of a weight, with the rules of scales of its layout.

        And with DeepSeek's least amax of 1e-4 if the scales show it. No file says whether it was
        used. If the least scale is exactly 1e-4 / 448, it was: blocks with a smaller amax have that
        scale then.
        """
        stored = self.stored[name]
        if self._target.layout in LAYOUTS:
            spec = LAYOUTS[self._target.layout].computed(stored.spec)
            stored = dataclasses.replace(stored, spec=spec)
        least = np.float32(DEEPSEEK_128X128.amax_epsilon) / np.float32(DEEPSEEK_128X128.largest)
        spec = stored.spec
        if len(spec.block) != 2 or (spec.element, spec.scale) != (E4M3FN, FLOAT32):
            return stored
        if np.nanmin(Values(stored, self._target.read_stored).scales(), initial=np.inf) != least:
            return stored
        spec = dataclasses.replace(spec, amax_epsilon=DEEPSEEK_128X128.amax_epsilon)
        return dataclasses.replace(stored, spec=spec)

    def _problem(self, name: str, what: str) -> None:
        self.problems.append(f"{shown(name)}: {what}")

    def _differences(
        self,
        name: str,
        expected: Iterator[tuple[str, np.ndarray]],
        read: Callable[[str, int, memoryview], None],
    ) -> None:
        """Compares (entry, next bytes of it) with what the target has."""
        places: dict[str, int] = {}
        for entry, array in expected:
            wanted = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            got = np.empty_like(wanted)
            start = places.get(entry, 0)
            read(entry, start, got.data)
            places[entry] = start + len(got)
            differ = np.flatnonzero(got != wanted)
            if len(differ):
                at = int(differ[0])
                self._problem(
                    name,
                    ("" if entry == name else f"{shown(entry)}: ")
                    + f"byte {start + at:,} is {got[at]}, expected {wanted[at]}; convert it again",
                )
                return

    def _rounded(self, info: TensorInfo, dtype: str) -> Iterator[tuple[str, np.ndarray]]:
        spec = BlockFormat.tensor(resolve(NUMPY_DTYPES[dtype]), scale=None)
        read = reader(self._source, info.name)
        _, pieces = quantized(read, info.shape, info.dtype, spec, sums=Sums())
        for piece in pieces:
            yield info.name, piece.codes

    def _shared_amax(self, name: str) -> float | None:
        """The largest magnitude of all weights with an equal second scale: they may share it."""
        second = self._seconds.get(name)
        if second is None or len(second) > 4:
            return None  # no second scale, or one for each expert, which is not shared
        if second not in self._amaxes:
            infos = self._source.tensors.values()
            sharing = (info for info in infos if self._seconds.get(info.name) == second)
            self._amaxes[second] = shared_amax(self._source, sharing)
        return self._amaxes[second]
