"""AMD: kernels compile for a card that nothing here launches, and whoever tries to serve is told so."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlsdc.compiler import cli
from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.errors import ArtifactError
from mlsdc.runtime.manifest import Manifest, ModelInfo, Plan, TargetInfo
from mlsdc.runtime.step import Limits
from mlsdc.targets import TARGETS, make_target
from mlsdc.targets.amd import AmdTarget, misfit
from mlsdc.targets.hardware import AMD_GPUS
from mlsdc.targets.kv_support import refused

LIMITS = Limits(max_model_len=128, max_num_seqs=2, max_num_batched_tokens=16, max_logit_rows=8, max_tree_nodes=7)


def test_the_target_is_listed_as_compile_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["targets"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("mi300x")]
    assert "gfx942" in line
    assert "compile-only, nothing launches it" in line


def test_kernels_compile_without_spills_and_say_what_they_need(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed (pip install mlsdc[nvidia])")
    from tests.targets.test_triton_compiled import specs

    target = make_target("mi300x", LIMITS)
    assert isinstance(target, AmdTarget)
    chosen = specs()[:3]  # attention, its combine, and the append
    info = target.build(chosen, tmp_path)
    assert (info.device, info.requires) == ("hip", ("gfx942",))
    assert sorted(info.kernels) == sorted(spec.key for spec in chosen)
    for kernel in info.kernels.values():
        code = (tmp_path / kernel.file).read_bytes()
        assert code[:4] == b"\x7fELF"
        assert int.from_bytes(code[18:20], "little") == 224  # EM_AMDGPU
        assert kernel.checked_by == "compiled"
        assert kernel.resources["threads"] % 64 == 0
        assert kernel.resources["shared_bytes"] <= AMD_GPUS["mi300x"].shared_bytes
    attention = info.kernels[chosen[0].key]
    assert attention.resources["tensor_ops"] > 0


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_linear_of_packed_weights_compiles_to_matrix_instructions(tmp_path: Path, weights: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed (pip install mlsdc[nvidia])")
    from mlsdc.compiler.cli_targets_compile import kernels

    (spec, *_) = [spec for spec in kernels("smollm2-135m", "mi300x", [weights], []) if spec.template == "linear_q"]
    (kernel,) = make_target("mi300x", LIMITS).build([spec], tmp_path).kernels.values()
    assert kernel.resources["tensor_ops"] > 0


def test_a_kernel_that_spills_or_is_too_large_does_not_fit() -> None:
    card = AMD_GPUS["mi300x"]
    fits = {"vgpr_spill_count": 0, "sgpr_spill_count": 0, "private_segment_fixed_size": 0, "shared_bytes": 65536}
    assert misfit(fits, card) is None
    assert misfit(fits | {"vgpr_spill_count": 18, "private_segment_fixed_size": 72}, card) == "spills (18 vector and 0 scalar registers)"
    assert misfit(fits | {"shared_bytes": 65537}, card) == "65537 bytes of local memory, 65536 allowed"


@pytest.mark.parametrize("device", ["auto", "mi300x", "hip"])
def test_an_artifact_for_it_cannot_be_served(device: str) -> None:
    model = ModelInfo("m", "llama", 8, 8, 1, None, (), "bf16", "m")
    target = TargetInfo("mi300x", "hip", ("gfx942",), (), {})
    manifest = Manifest(model, LIMITS, (), (target,), Plan(0, 0), {}, {}, {}, {})
    with pytest.raises(ArtifactError) as caught:
        Artifact(Path("m.mlsdc"), manifest).pick_target(device)
    assert str(caught.value).startswith("m.mlsdc: built for mi300x, which is compile-only: this runtime does not launch AMD kernels")
    assert "\n" not in str(caught.value)


def test_cache_formats_are_those_of_the_triton_kernels() -> None:
    assert refused("mi300x", "int8", 80) == refused("h100", "int8", 80) != ""
    assert refused("mi300x", "int8", 64) == ""


def test_what_it_is_called_with_is_the_nvidia_kernels_install() -> None:
    assert TARGETS["mi300x"].extra == "nvidia"
