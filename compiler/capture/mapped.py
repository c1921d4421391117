"""A file mapped into memory, whose pages can be given back."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


class Mapped:
    """`bytes` u8 of the whole file, read-only. Raises OSError, ValueError (an empty file)."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    def forget(self) -> None:
        """Pages read so far leave this process's memory; views stay valid, what they touch is mapped again.

        Without it a checkpoint read tensor by tensor counts as a whole against a memory limit in the end.
        """
        self._map.madvise(mmap.MADV_DONTNEED)
