"""A whole artifact whose attention is CUDA C++ (kernels: {attention: nvrtc}): what it holds, its launches, its texts, what is refused."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from mlsdc.compiler.cli import main
from mlsdc.compiler.errors import CompileError, ConfigError
from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.device.cuda import CudaDevice
from mlsdc.runtime.device.cuda_driver import Driver
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.errors import DeviceError
from mlsdc.runtime.manifest import KernelInfo
from mlsdc.runtime.step import Header
from mlsdc.targets.cubin import params
from tests.gpu.fake_cuda import FakeCuda
from tests.gpu.test_interpret import PARAMS, PROMPTS, with_level
from tests.gpu.tiny import VOCAB, config, write_model
from tests.once import once

NVRTC = {"attention": "nvrtc", "variants": False}


@pytest.fixture(scope="session")
def tiny_nvrtc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with heads of 64 channels, for h100; read only."""
    pytest.importorskip("triton", reason="triton is not installed (pip install mlsdc[nvidia])")
    from mlsdc.compiler import compile_model

    def make(folder: Path) -> None:
        (folder / "model").mkdir()
        write_model(folder / "model", head_dim=64)
        compile_model(config(folder / "model", "h100", exact=False) | {"kernels": NVRTC}, folder / "tiny.mlsdc")

    return once(tmp_path_factory, "gpu-tiny-nvrtc", make) / "tiny.mlsdc"


@pytest.fixture(scope="module")
def artifact(tiny_nvrtc: Path) -> Artifact:
    return Artifact.open(tiny_nvrtc)


@pytest.fixture(scope="module")
def attention(artifact: Artifact) -> KernelInfo:
    (found,) = [info for info in artifact.manifest.targets[0].kernels.values() if info.source.endswith(".cu")]
    return found


def test_an_artifact_that_is_not_exact_says_so(tiny_nvrtc: Path, tiny_gpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Law L2: a mode that gives up the bits of rows is named."""
    assert not any(target.exact for target in Artifact.open(tiny_nvrtc).manifest.targets)
    assert all(target.exact for target in Artifact.open(tiny_gpu).manifest.targets)
    for path, said in ((tiny_nvrtc, True), (tiny_gpu, False)):
        assert main(["inspect", str(path)]) == 0
        assert ("not exact: a drafted row's bits may differ" in capsys.readouterr().out) is said


def test_attention_is_the_only_kernel_in_cuda_and_says_what_it_was_checked_by(attention: KernelInfo) -> None:
    assert attention.entry.startswith("attend_split")
    assert attention.checked_by == "emulated"
    assert attention.resources["stack_bytes"] == 0
    assert attention.resources["min_driver"] == 525


def test_the_cuda_device_loads_it_and_launches_it_with_arguments_of_its_table(artifact: Artifact, attention: KernelInfo) -> None:
    """The fake driver refuses a wrong count, a wild or misaligned pointer, and shared memory that was not asked for."""
    fake = FakeCuda()
    device = CudaDevice(artifact, artifact.manifest.targets[0], driver=Driver(fake))
    level = device.load_level("target", 40)
    for name, count in {"ROWS": 3, "SEQS": 1, "OUT": 3}.items():
        level.buffers.header[Header[name]] = count
    level.programs["forward"].run()
    device.synchronise()
    launched = [each for each in fake.launched if each.entry == attention.entry]
    table = params(artifact.path(attention.file).read_bytes(), attention.entry)
    assert len(launched) == 2  # layers
    for each in launched:
        assert [len(value) for value in each.values] == [param.bytes for param in table]
        assert (each.threads, each.shared) == (attention.resources["threads"], attention.resources["shared_bytes"])
    device.close()


def test_texts_through_it_and_the_fake_driver_are_the_cpus(root: Path, tmp_path: Path, tiny_nvrtc: Path) -> None:
    """Trees, greedy and sampled; attention runs as C++, all else in Triton's interpreter."""
    from mlsdc.compiler import compile_model

    compile_model(config(tiny_nvrtc.parent / "model", "cpu-native"), tmp_path / "cpu.mlsdc")
    said = with_level(tmp_path / "cpu.mlsdc", None).texts[:2]
    prompts, asked = PROMPTS[:2], PARAMS[:2]  # greedy, and sampled
    texts = [prompt + text for prompt, text in zip(prompts, said, strict=True)]
    job = tmp_path / "job.pickle"
    job.write_bytes(pickle.dumps({"pages": 40, "texts": texts, "vocab": VOCAB, "prompts": prompts, "params": asked}))
    done = subprocess.run([sys.executable, "-m", "tests.gpu.run_cuda", str(tiny_nvrtc), str(job)], capture_output=True, text=True, cwd=root,
                          env={**os.environ, "TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["texts"] == said


@pytest.mark.parametrize(("show", "part"), [("source", 'extern "C" __global__ void'), ("ptx", "wgmma.mma_async"), ("sass", "HGMMA")])
def test_inspect_shows_it(tiny_nvrtc: Path, attention: KernelInfo, show: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tiny_nvrtc), "--kernel", attention.entry, "--show", show]) == 0
    assert part in capsys.readouterr().out


def test_device_interpret_refuses_it_by_one_line(tiny_nvrtc: Path, attention: KernelInfo) -> None:
    with pytest.raises(DeviceError, match=f"device interpret runs Triton's kernels, '{attention.entry}' is CUDA C\\+\\+"):
        Engine.load(tiny_nvrtc, num_pages=40, device="interpret")


@pytest.mark.parametrize(("hardware", "exact", "message"), [
    ("a100", False, "kernels.attention: nvrtc: is for h100 and h200 (sm_90), 'a100' is sm_80"),
    ("cpu-native", False, "kernels.attention: nvrtc: is for h100 and h200 (sm_90), 'cpu-"),
    ("h100", True, "kernels.attention: nvrtc: adds up a drafted row's ancestors in the order of the tree's slots"),
])
def test_what_it_is_not_for_is_an_error_at_its_key(tiny_model: Path, tmp_path: Path, hardware: str, exact: bool, message: str) -> None:
    from mlsdc.compiler import compile_model

    with pytest.raises(ConfigError) as caught:
        compile_model(config(tiny_model, hardware, exact=exact) | {"kernels": NVRTC}, tmp_path / "never.mlsdc")
    assert message in str(caught.value)


def test_a_model_it_has_no_kernel_for_is_declined_by_node(tiny_model: Path, tmp_path: Path) -> None:
    from mlsdc.compiler import compile_model

    with pytest.raises(CompileError, match=r"layers\.0\.attn\.attend: attention by nvrtc does not do head_dim 32; it does 64 and 128"):
        compile_model(config(tiny_model, "h100", exact=False) | {"kernels": NVRTC}, tmp_path / "never.mlsdc")
