"""The streaming read: the artifact's own kernel over memory that no cache holds, on the device's own threads. The roof of every figure."""

from __future__ import annotations

import time

import numpy as np

from mlsdc.runtime.bench import STREAM_BLOCK as BLOCK
from mlsdc.runtime.device.base import Device
from mlsdc.runtime.device.cpu import CpuDevice, big_array
from mlsdc.runtime.device.host_list import INT, LAUNCH_WORDS, POINTER
from mlsdc.runtime.errors import DeviceError
from mlsdc.runtime.step import aligned

KERNEL = "stream_read"
BYTES = 512 << 20


class StreamRead:
    """Reads the same `num_bytes` each time, in huge pages where the system gives them."""

    def __init__(self, device: Device, num_bytes: int = BYTES) -> None:
        """Raises DeviceError for devices whose reads this cannot measure, ArtifactError for artifacts without the kernel."""
        if not isinstance(device, CpuDevice):
            raise DeviceError(f"device '{device.name}': no streaming read to measure")
        tasks = num_bytes // BLOCK
        self.device = device
        self.num_bytes = tasks * BLOCK
        self._data = big_array(self.num_bytes)
        self._data.view(np.int32)[:] = 1
        self._sums = aligned((tasks, 16), "i4")
        self._args = aligned((4, 2), "i8")
        self._args[:] = (INT, 0), (INT, 0), (POINTER, self._data.ctypes.data), (POINTER, self._sums.ctypes.data)
        self._launch = aligned((1, LAUNCH_WORDS), "i8")
        self._launch[0, :6] = device.address(KERNEL), self._args.ctypes.data, 4, tasks, -1, 1
        self._header = aligned((16,), "i4")

    def run(self) -> float:
        """Bytes a second of one pass over all of it. Raises DeviceError if it was not all read."""
        self._sums[:] = 0
        start = time.perf_counter()
        self.device.launch_list(self.device.pool.ctypes.data, self._launch.ctypes.data, 1, self._header.ctypes.data)
        seconds = time.perf_counter() - start
        if (self._sums != BLOCK // 64).any():
            raise DeviceError("the streaming read left something out; compile again")
        return self.num_bytes / seconds
