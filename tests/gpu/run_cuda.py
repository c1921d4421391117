"""The cuda device on the fake driver, its kernels executed by Triton's interpreter, those in CUDA C++ as C++ on this machine:
`python -m tests.gpu.run_cuda ARTIFACT JOB`."""

from __future__ import annotations

import ctypes as C
import json
import os
import pickle
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.device.cuda import CudaDevice
from mlsdc.runtime.device.cuda_driver import Driver
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.manifest import KernelInfo
from mlsdc.runtime.tensor_map import param_bytes, tiles_of
from tests.gpu.fake_cuda import FakeCuda, Launched
from tests.laws.proposers import Known


class Interpreted:
    """Runs what the fake driver launched."""

    def __init__(self, artifact: Artifact, target: str) -> None:
        import torch

        from mlsdc.targets.triton_build import load_source
        from mlsdc.targets.triton_interpreter import interpret

        self.torch, self.load, self.interpret = torch, load_source, interpret
        self.artifact = artifact
        self.kernels = next(t.kernels for t in artifact.manifest.targets if t.name == target)
        self.sources = {info.entry: info.source for info in self.kernels.values()}
        self.abi = {info.entry: info.abi for info in self.kernels.values()}
        for info in self.kernels.values():
            for variant in info.variants.values():
                self.sources[variant.entry], self.abi[variant.entry] = variant.source, info.abi
        self.functions: dict[str, Any] = {}
        self.fake: FakeCuda

    def __call__(self, launched: Launched) -> None:
        from mlsdc.targets.interpret_worker import ELEMENTS
        from mlsdc.targets.triton_interpreter import descriptor

        if self.sources[launched.entry].endswith(".cu"):
            self.host(self.kernels[launched.entry], launched)
            return
        if launched.entry not in self.functions:
            self.functions[launched.entry] = self.load(self.artifact.path(self.sources[launched.entry]), launched.entry)
        args: list[Any] = []
        given = iter(launched.values)
        for entry in self.abi[launched.entry]:
            type_ = entry.split(": ")[1]
            value, *_ = (next(given) for _ in param_bytes(type_))
            if type_ == "null":
                continue
            if (tiles := tiles_of(type_)) is not None:
                made = self.fake.maps[value]
                data = self.torch.from_numpy(self.fake.block(made.address))
                size = tiles.element_bytes
                typed = data[: len(data) // size * size].view(ELEMENTS[tiles.dtype])
                args.append(descriptor(typed, made.sizes[::-1], tiles))
                continue
            if not type_.startswith("*"):
                args.append(struct.unpack("<f", value)[0] if type_ == "f32" else int.from_bytes(value, "little", signed=True))
                continue
            dtype = ELEMENTS[type_[1:]]
            data = self.fake.block(int.from_bytes(value, "little"))
            args.append(self.torch.from_numpy(data[: len(data) // dtype.itemsize * dtype.itemsize]).view(dtype))
        self.interpret(self.functions[launched.entry], launched.grid, args)

    def host(self, info: KernelInfo, launched: Launched) -> None:
        """A kernel in CUDA C++. Raises AssertionError with what the machine of tests.targets.cuda_machine finds wrong."""
        from tests.targets.cuda_machine import host_function

        if info.entry not in self.functions:
            self.folder = tempfile.TemporaryDirectory()
            text, r = self.artifact.path(info.source).read_text(), info.resources
            self.functions[info.entry] = host_function(
                info.entry, text, info.abi, r["threads"], r["shared_bytes"], Path(self.folder.name))
        addresses = [int.from_bytes(value, "little") for value in launched.values]
        pool = addresses[[entry.split(": ")[0] for entry in info.abi].index("pool")]
        size = C.c_ulonglong(len(self.fake.block(pool)))
        said = self.functions[info.entry](launched.grid, 0, 1, C.c_void_p(pool), size, (C.c_void_p * len(addresses))(*addresses))
        assert said == b"", said.decode()


def main() -> None:
    job = pickle.loads(Path(sys.argv[2]).read_bytes())
    artifact = Artifact.open(Path(sys.argv[1]))
    target = artifact.manifest.targets[0]
    execute = Interpreted(artifact, target.name)
    execute.fake = fake = FakeCuda(sm=int(target.requires[0].removeprefix("sm_")), execute=execute)
    device = CudaDevice(artifact, target, driver=Driver(fake))
    device.take_kernels(Path(job["kernels"]) if "kernels" in job else None)
    memory = device.load_level(artifact.manifest.target_level.name, job["pages"])
    known = Known(job["texts"], job["vocab"])
    with Engine(artifact.manifest, device, memory, [known.level("trees")]) as engine:
        before = fake.calls.count("cuStreamSynchronize")
        results = engine.generate(job["prompts"], job["params"])
        waits = fake.calls.count("cuStreamSynchronize") - before
    print(json.dumps({"texts": [list(result.token_ids) for result in results], "waits": waits, "left": len(fake.memory),
                      "entries": sorted(execute.functions)}))


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    main()
