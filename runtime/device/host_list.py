"""Calls of host functions that are made in one go: a launch list whose tasks all run on the calling thread.

A step that drafts makes a few calls for every request. Made one by one from Python they cost more than what they do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mlsdc.runtime.errors import DeviceError
from mlsdc.runtime.step import Array, aligned

INT, FLOAT, POINTER = 1, 3, 4  # tvm-ffi type indices
ERROR = 19  # word of the pool
ONE_GRAIN = 1 << 40  # whatever the count: a launch of one grain stays on the calling thread
LAUNCH_WORDS = 8  # templates/llvm/walker.ll.jinja


class HostList:
    """`calls` are (function, arguments): arrays are passed by address and must outlive the list, the rest are numbers.

    Call i runs tasks 0 .. counts[i] - 1 of its function; none if that is 0.
    """

    def __init__(self, run: Callable[..., Any], pool: Array, address: Callable[[str], int], calls: Sequence[tuple[str, Sequence[Any]]]
                 ) -> None:
        self._run, self._pool = run, pool
        self._names = [name for name, _ in calls]
        self.counts = aligned((len(calls),), "i4")
        self.launches = aligned((max(1, len(calls)), LAUNCH_WORDS), "i8")
        self.args: list[Array] = []  # (type, value) a row, the range of tasks first
        for i, (name, arguments) in enumerate(calls):
            args = aligned((2 + len(arguments), 2), "i8")
            args[:2, 0] = INT
            self.args.append(args)
            for j, argument in enumerate(arguments):
                self.set(i, j, argument)
            self.launches[i, :6] = address(name), args.ctypes.data, len(args), 1, i, ONE_GRAIN
        self._call = pool.ctypes.data, self.launches.ctypes.data, len(calls), self.counts.ctypes.data

    def set(self, call: int, argument: int, value: Any) -> None:
        """Give a call another argument."""
        row = self.args[call][2 + argument]
        if isinstance(value, float):
            row[0] = FLOAT
            row[1:].view("f8")[0] = value
        elif isinstance(value, int):
            row[:] = INT, value
        else:
            row[:] = POINTER, value.ctypes.data

    def run(self) -> None:
        """Raises DeviceError."""
        self._run(*self._call)
        if self._pool[ERROR]:
            raise DeviceError(f"host function '{self._names[int(self._pool[ERROR]) - 1]}' refused its arguments; compile again")
