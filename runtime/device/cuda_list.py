"""A level's own kernels on an NVIDIA GPU (kernel_list.py): graphs that bring the host's words, launch, and take the results
back; one for each size of what is sent."""

from __future__ import annotations

import ctypes as C
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mlsdc.runtime.device.cuda_program import powers
from mlsdc.runtime.device.kernel_list import Block, CallArg, KernelCall, KernelList, list_bytes, roles
from mlsdc.runtime.errors import ArtifactError
from mlsdc.runtime.program import InputArg

if TYPE_CHECKING:
    from mlsdc.runtime.device.cuda import CudaDevice, CudaLevel

LEAST_SENT = 1024  # bytes


class CudaKernelList(KernelList):
    """Bound to the target's step inputs and to blocks of its own, in one allocation. Raises ArtifactError, DeviceError."""

    def __init__(self, device: CudaDevice, target: CudaLevel, blocks: Mapping[str, Block], calls: Sequence[KernelCall]) -> None:
        self.device, self.target, self.blocks = device, target, blocks
        device.use()
        self._places: dict[str, int] = {}
        at = device.take(list_bytes(blocks))
        for name, block in blocks.items():
            self._places[name] = at
            at += block.room
        self.arrays = {name: device.pinned(blocks[name].num_bytes) for name in roles(blocks, "brought", "sent", "taken")}
        for name in roles(blocks, "kept"):
            data = blocks[name].data
            if data is not None:
                device.upload(self._places[name], np.ascontiguousarray(data))
        self._sent = next(iter(roles(blocks, "sent")))
        self._bound = [self._bind(call) for call in calls]
        most = blocks[self._sent].num_bytes
        self._graphs = {size: self._capture(size) for size in (0, *(size for size in powers(most) if size >= min(LEAST_SENT, most)))}
        self._epoch = -1  # of the device at the last start

    def start(self, num_bytes: int) -> None:
        device = self.device
        device.use()
        graph = self._graphs[next(size for size in self._graphs if size >= num_bytes)]
        device.driver.cuGraphLaunch(graph, device.stream)
        self._epoch = device.epoch

    def finish(self) -> None:
        if self._epoch == self.device.epoch:
            self.device.use()
            self.device.synchronise()

    def _bring(self, name: str, num_bytes: int) -> None:
        device = self.device
        device.driver.cuMemcpyHtoDAsync_v2(
            C.c_uint64(self._places[name]), C.c_void_p(self.arrays[name].ctypes.data), C.c_size_t(num_bytes), device.stream)

    def _bind(self, call: KernelCall) -> _Bound:
        kernel = self.device.kernel(call.kernel)
        types = [entry.split(": ")[1] for entry in kernel.info.abi]
        given = len(types) - types.count("null")
        if given != len(call.args):
            raise ArtifactError(f"kernel '{call.kernel}' takes {given} arguments, {len(call.args)} are given; compile again")
        values = [self._value(call, arg, type_) for arg, type_ in zip(call.args, types, strict=False)]
        return _Bound(kernel.function, call, kernel.info.resources, [*values, *(C.c_uint64(0) for _ in range(types.count("null")))])

    def _value(self, call: KernelCall, arg: CallArg, type_: str) -> C.c_uint64 | C.c_int64 | C.c_int32 | C.c_float:
        if isinstance(arg, str | InputArg) and type_.startswith("*"):
            return C.c_uint64(self._places[arg] if isinstance(arg, str) else self.target.inputs + self.target.places[arg.input])
        if isinstance(arg, int) and type_ in ("i32", "i64"):
            return C.c_int32(arg) if type_ == "i32" else C.c_int64(arg)
        if isinstance(arg, float) and type_ == "f32":
            return C.c_float(arg)
        raise ArtifactError(f"kernel '{call.kernel}' wants {type_}, it is given {arg}; compile again")

    def _capture(self, sent: int) -> C.c_void_p:
        driver, stream = self.device.driver, self.device.stream
        with self.device.capturing() as graph:
            for name in roles(self.blocks, "brought"):
                self._bring(name, self.blocks[name].num_bytes)
            if sent:
                self._bring(self._sent, sent)
            for bound in self._bound:
                r, call = bound.resources, bound.call
                if sent or not call.if_sent:
                    driver.cuLaunchKernel(
                        bound.function, call.grid, 1, 1, r["threads"], 1, 1, r["shared_bytes"], stream, bound.params, None)
            for name in roles(self.blocks, "taken"):
                array = self.arrays[name]
                driver.cuMemcpyDtoHAsync_v2(C.c_void_p(array.ctypes.data), C.c_uint64(self._places[name]), C.c_size_t(len(array)), stream)
        self.device.graphs.append(graph)
        return graph


class _Bound:
    """A kernel and its arguments as the driver reads them."""

    def __init__(self, function: C.c_void_p, call: KernelCall, resources: Mapping[str, int],
                 values: Sequence[C.c_uint64 | C.c_int64 | C.c_int32 | C.c_float]) -> None:
        self.function, self.call, self.resources, self._values = function, call, resources, values
        self.params = (C.c_void_p * len(values))(*(C.addressof(value) for value in values))
