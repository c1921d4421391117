"""A level's own kernels on device `interpret` (runtime/device/kernel_list.py): the blocks lie in the shared file, between guard zones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mlsdc.runtime.device.kernel_list import Block, KernelCall, KernelList
from mlsdc.runtime.program import InputArg

if TYPE_CHECKING:
    from mlsdc.targets.interpret import InterpretDevice, InterpretLevel


class InterpretKernelList(KernelList):
    """The worker runs the calls; nothing is brought or taken, since both processes see the same arrays."""

    def __init__(self, device: InterpretDevice, target: InterpretLevel, number: int, blocks: Mapping[str, Block],
                 calls: Sequence[KernelCall]) -> None:
        self.device, self.number = device, number
        arrays, described = device.memory.arrays({name: block.num_bytes for name, block in blocks.items()})
        for name, block in blocks.items():
            if block.data is not None:
                data = np.ascontiguousarray(block.data).reshape(-1).view(np.uint8)
                arrays[name][: len(data)] = data
        self.arrays = arrays
        asked = [{"kernel": call.kernel, "grid": call.grid, "if_sent": call.if_sent,
                  "args": [{"input": arg.input} if isinstance(arg, InputArg) else arg for arg in call.args]} for call in calls]
        device.worker.ask("list", number=number, level=target.name, blocks=described, calls=asked)

    def start(self, num_bytes: int) -> None:
        self.device.worker.ask("run_list", number=self.number, sent=num_bytes > 0)

    def finish(self) -> None:
        return
