"""Kernels that a level launches by itself, one after the other, over blocks of memory with fixed places on the device.

What a launch list (runtime/program.py) is to a level with weights, this is to one without: the n-gram level's tables are no step inputs and
no weights. A device that has kernels makes one at load (`Device.kernel_list`); a step starts it behind the target's programs and reads what
it brought back once the device has been waited for, by whomever.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Union

from mlsdc.runtime.program import InputArg
from mlsdc.runtime.step import Array

ALIGNMENT = 256  # bytes: where blocks begin


@dataclass(frozen=True)
class Block:
    """`num_bytes` of device memory. `role`: `kept` there (it begins as `data`, or as anything); `brought` from the host at every start;
    `sent`, one of them: as much of it as a start says; `taken` back to the host after the kernels."""

    num_bytes: int
    role: Literal["kept", "brought", "sent", "taken"] = "kept"
    data: Array | None = None

    @property
    def room(self) -> int:
        """Its bytes, up to where the next block begins."""
        return -(-self.num_bytes // ALIGNMENT) * ALIGNMENT


CallArg = Union[str, InputArg, int, float]  # a block's name, a step input of the target, a number


@dataclass(frozen=True)
class KernelCall:
    """`grid` programs of the artifact's kernel `kernel`. `if_sent`: only at starts at which something is sent."""

    kernel: str
    grid: int
    args: tuple[CallArg, ...]
    if_sent: bool = False


def list_bytes(blocks: Mapping[str, Block]) -> int:
    """Of device memory, for all blocks."""
    return sum(block.room for block in blocks.values())


class KernelList(ABC):
    """Not thread-safe: the step owns it."""

    arrays: dict[str, Array]  # host memory of blocks that are not kept, u8; `taken` ones are valid after `finish`, until the next start

    @abstractmethod
    def start(self, num_bytes: int) -> None:
        """Launch behind all that was started, without waiting. `num_bytes` of the front of the sent block are read by the kernels."""

    @abstractmethod
    def finish(self) -> None:
        """Return when taken blocks can be read; no wait where the device has been waited for since the start."""


def roles(blocks: Mapping[str, Block], *roles: str) -> Sequence[str]:
    """Names of blocks of some roles, in order."""
    return [name for name, block in blocks.items() if block.role in roles]
