"""A GPU artifact as compiled here: what its kernels take, what its manifest says of them, and what `inspect` shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlsdc.compiler.cli import main
from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.manifest import KernelInfo, TargetInfo
from mlsdc.targets import cubin
from mlsdc.targets.hardware import GPUS
from mlsdc.targets.nvidia_layout import pack_q4, pack_q8, packed_bytes, unpack_q4, unpack_q8

SIZES = {"null": 8, "i32": 4, "f32": 4}


@pytest.fixture(scope="module")
def artifact(tiny_gpu: Path) -> Artifact:
    return Artifact.open(tiny_gpu)


def kernels(artifact: Artifact) -> list[tuple[TargetInfo, KernelInfo]]:
    return [(target, info) for target in artifact.manifest.targets for info in target.kernels.values()]


def test_no_kernel_spills_or_wants_more_than_its_gpu_has(artifact: Artifact) -> None:
    for target, info in kernels(artifact):
        used, gpu = info.resources, GPUS[target.name]
        assert used["stack_bytes"] == 0
        assert used["shared_bytes"] <= gpu.shared_bytes
        assert used["registers"] * used["threads"] <= gpu.registers


def test_arguments_of_every_kernel_are_the_parameter_table_of_its_cubin(artifact: Artifact) -> None:
    for _, info in kernels(artifact):
        types = [entry.split(": ")[1] for entry in info.abi]
        table = cubin.params(artifact.path(info.file).read_bytes(), info.entry)
        assert [param.bytes for param in table] == [8 if type_.startswith("*") else SIZES[type_] for type_ in types]


def test_linears_and_attention_run_on_tensor_cores(artifact: Artifact) -> None:
    for _, info in kernels(artifact):
        if info.entry.startswith(("linear_q", "gated_q", "attend_split")):
            assert info.resources["tensor_ops"] > 0


def test_drivers_from_525_on_load_it(artifact: Artifact) -> None:
    assert {info.resources["min_driver"] for _, info in kernels(artifact)} == {525}


def test_both_targets_have_the_same_kernels_and_share_the_weights(artifact: Artifact) -> None:
    h100, a100 = artifact.manifest.targets
    assert (h100.name, a100.name) == ("h100", "a100")
    assert list(h100.kernels) == list(a100.kernels)
    assert len(artifact.manifest.weights) == 1


def test_inspect_shows_what_every_kernel_takes(tiny_gpu: Path, artifact: Artifact, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tiny_gpu), "--kernels"]) == 0
    text = capsys.readouterr().out
    assert all(key in text for target in artifact.manifest.targets for key in target.kernels)
    assert "h100: " in text
    assert "a100: " in text


@pytest.mark.parametrize(("show", "part"), [("source", "@triton.jit"), ("ptx", ".target sm_80"), ("sass", "IMMA")])
def test_inspect_shows_a_kernel(tiny_gpu: Path, artifact: Artifact, show: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    key = next(key for key in artifact.manifest.targets[1].kernels if key.startswith("linear_q"))
    assert main(["inspect", str(tiny_gpu), "--kernel", key, "--show", show, "--target", "a100"]) == 0
    assert part in capsys.readouterr().out


def test_a_kernel_that_is_not_there_is_an_error(tiny_gpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tiny_gpu), "--kernel", "nope", "--target", "a100"]) == 2
    assert "--kernel: no kernel 'nope' of target 'a100'" in capsys.readouterr().err


@pytest.mark.parametrize(("n", "k"), [(16, 32), (40, 96), (272, 128)])
def test_packed_weights_are_read_back(n: int, k: int) -> None:
    import numpy as np

    from mlsdc.compiler.quantise import quantise_q4, quantise_q8

    values = np.random.default_rng(0).standard_normal((n, k), np.float32)
    q8, q4 = quantise_q8(values), quantise_q4(values)
    data8, data4 = pack_q8(q8), pack_q4(q4)
    assert (len(data8), len(data4)) == (packed_bytes(n, k, 8), packed_bytes(n, k, 4))
    assert np.array_equal(unpack_q8(data8, n, k).dequantise(), q8.dequantise())
    assert np.array_equal(unpack_q4(data4, n, k).dequantise(), q4.dequantise())
