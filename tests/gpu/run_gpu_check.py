"""The numerics of gpu-check on the fake driver, its kernels executed by Triton's interpreter: `python -m tests.gpu.run_gpu_check ARTIFACT`.

Prints JSON: a line for each kernel, the needle, what was not compared, and the same of a card that adds 1 to what one kernel writes.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from mlsdc.compiler.cli_gpu_check import GpuRig, kernel_numerics
from mlsdc.compiler.cli_gpu_needle import find_needle
from mlsdc.compiler.view.stages import read_graphs
from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.device import cuda_driver
from tests.gpu.fake_cuda import FakeCuda, Launched
from tests.gpu.run_cuda import Interpreted


class Wrong(Interpreted):
    """A card on which one template's kernels write other numbers."""

    template = ""

    def __call__(self, launched: Launched) -> None:
        super().__call__(launched)
        if self.template and launched.entry.startswith(self.template):
            at = [entry.split(": ")[0] for entry in self.kernels[launched.entry].abi].index("y_ptr")
            self.fake.block(int.from_bytes(launched.values[at], "little"))[:64].view("f4")[:] += 1.0


def check(path: Path, template: str) -> dict[str, Any]:
    artifact = Artifact.open(path)
    target = artifact.manifest.targets[0]
    execute = Wrong(artifact, target.name)
    execute.template = template
    execute.fake = fake = FakeCuda(sm=int(target.requires[0].removeprefix("sm_")), execute=execute)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_driver, "load_library", lambda: fake)
        with GpuRig(path, device="cuda") as rig:
            file = f"graph/{rig.manifest.target_level.name}.ir"
            graph = read_graphs(artifact.path(file).read_text(encoding="utf-8"), file)["forward"]
            notes: list[str] = []
            kernels = [asdict(kernel) | {"passed": kernel.passed} for kernel in kernel_numerics(rig, graph, notes)]
            needle = None if template else find_needle(rig, graph, rig.limits.max_model_len - rig.limits.max_tree_nodes - 1)
            return {"kernels": kernels, "needle": needle and asdict(needle) | {"passed": needle.passed}, "notes": notes}


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    print(json.dumps([check(Path(sys.argv[1]), template) for template in ("", "gated_q")]))
