"""How much a conversion may take: bytes of a file, threads, memory. No JAX here."""

import os
import re

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}i": 2 ** (10 * power) for power, unit in enumerate("KMGT", 1)}
_SIZE = re.compile(r"(\d{1,99}(?:\.\d+)?)\s*([KMGT]?i?)B?", re.IGNORECASE)
_BASE_MEMORY = 340 * 2**20  # Python, JAX, compiled programs: 260 to 300 measured, by machine
_WORKER_MEMORY = 20 * 2**20  # chunks that are read, quantized and written: 8 to 17 measured


def byte_count(size: int | str, name: str = "max_shard_size") -> int:
    """The bytes that "5GB", "500MiB" or a number stand for; `name` is what messages call it.

    Raises:
      ValueError: It is neither, or not above 0.
    """
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if match:
        unit = match[2][:1].upper() + match[2][1:].lower()
        count = int(float(match[1]) * _UNITS[unit]) if unit in _UNITS else 0
    else:
        count = size if isinstance(size, int) and not isinstance(size, bool) else 0
    if count <= 0:
        raise ValueError(f"{name}={size!r}, expected such as '5GB', '500MiB' or bytes")
    return count


def file_limit(max_shard_size: int | str | None) -> int:
    """The `byte_count` of a file of a folder; None stands for 5 GB."""
    return 5 * 10**9 if max_shard_size is None else byte_count(max_shard_size)


def worker_count(workers: int | None = None, max_memory: int | str | None = None) -> int:
    """Threads of a conversion, `workers` or one for each core and at most 4.

    Fewer, where 340 MiB and 20 MiB for each of them exceed `max_memory`.

    Raises:
      ValueError: One of the two is out of range.
    """
    if workers is None:
        workers = min(os.cpu_count() or 1, 4)
    if isinstance(workers, bool) or not isinstance(workers, int) or not 1 <= workers <= 64:
        raise ValueError(f"workers={workers!r}, expected 1 to 64")
    if max_memory is None:
        return workers
    fit = (byte_count(max_memory, "max_memory") - _BASE_MEMORY) // _WORKER_MEMORY
    if fit < 1:
        least = (_BASE_MEMORY + _WORKER_MEMORY) // 2**20
        raise ValueError(f"max_memory={max_memory!r}, expected '{least}MiB' or more")
    return min(workers, fit)
