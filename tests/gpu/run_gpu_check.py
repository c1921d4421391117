"""The numerics of gpu-check on the fake driver, its kernels executed by Triton's interpreter:
`python -m tests.gpu.run_gpu_check ARTIFACT GROUPED`.

Prints JSON: a line for each kernel, the needle, what was not compared, the same of a card that adds 1 to what two kernels write, and,
without the choices, of an artifact with a grouped cache on a card that does not bring a prompt's last tokens into the ring.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from mlsdc.compiler import cli_gpu_sampling
from mlsdc.compiler.cli_gpu_check import GpuRig
from mlsdc.compiler.cli_gpu_needle import find_needle
from mlsdc.compiler.cli_gpu_numerics import kernel_numerics
from mlsdc.compiler.view.stages import read_graphs
from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.device import cuda_driver
from tests.gpu.fake_cuda import FakeCuda, Launched
from tests.gpu.run_cuda import Interpreted


class Wrong(Interpreted):
    """A card on which some templates' kernels write other numbers (`wrong` says to which parameter) or, if to none, do nothing."""

    wrong: Mapping[str, str] = MappingProxyType({})

    def __call__(self, launched: Launched) -> None:
        template = next((name for name in self.wrong if launched.entry.startswith(name)), None)
        if template is None or self.wrong[template]:
            super().__call__(launched)
        if template is not None and self.wrong[template]:
            at = [entry.split(": ")[0] for entry in self.kernels[launched.entry].abi].index(self.wrong[template])
            self.fake.block(int.from_bytes(launched.values[at], "little"))[:64].view("f4")[:] += 1.0


def check(path: Path, wrong: Mapping[str, str] = MappingProxyType({}), choices: Sequence[str] = tuple(cli_gpu_sampling.CASES)
          ) -> dict[str, Any]:
    """`choices`: what is asked of them."""
    artifact = Artifact.open(path)
    target = artifact.manifest.targets[0]
    execute = Wrong(artifact, target.name)
    execute.wrong = wrong
    execute.fake = fake = FakeCuda(sm=int(target.requires[0].removeprefix("sm_")), execute=execute)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_driver, "load_library", lambda: fake)
        patch.setattr(cli_gpu_sampling, "CASES", {name: cli_gpu_sampling.CASES[name] for name in choices})
        with GpuRig(path, device="cuda") as rig:
            file = f"graph/{rig.manifest.target_level.name}.ir"
            graph = read_graphs(artifact.path(file).read_text(encoding="utf-8"), file)["forward"]
            notes: list[str] = []
            kernels = [asdict(kernel) | {"passed": kernel.passed} for kernel in kernel_numerics(rig, graph, notes)]
            needle = None if "gated_q" in wrong else find_needle(rig, graph, rig.limits.max_model_len - rig.limits.max_tree_nodes - 1)
            return {"kernels": kernels, "needle": needle and asdict(needle) | {"passed": needle.passed}, "notes": notes}


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    plain, grouped = map(Path, sys.argv[1:])
    print(json.dumps([check(plain), check(plain, {"gated_q": "y_ptr", "sample_bound": "last_x_ptr"}, ["top_k"]),
                      check(grouped, {"settle_kv": ""}, [])]))
