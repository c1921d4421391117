"""The Triton lowering of paged attention, compiled ahead of time for GPUs that this machine does not have."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from mlsdc.compiler.errors import CompileError
from mlsdc.compiler.ops_core import Cast
from mlsdc.compiler.ops_quant import AppendKvSlice, RopeSlice
from mlsdc.compiler.types import DType, TreeType
from mlsdc.runtime.manifest import TargetInfo
from mlsdc.runtime.step import Limits
from mlsdc.targets import cubin
from mlsdc.targets.hardware import GPUS
from mlsdc.targets.nvidia import NvidiaTarget
from mlsdc.targets.protocol import Declined, KernelSpec, Lowering
from mlsdc.targets.triton_build import render, tools_folder, triton_type
from tests.targets.attention_vectors import LIMITS, Shape
from tests.targets.interpret_attention import attention_graph, kv_type, lowered, node_graph

pytest.importorskip("triton", reason="triton is not installed (pip install mlsdc[nvidia])")

SMOLLM2 = Shape(9, 3, 64, page_size=32, num_layers=30, layer=29)
LLAMA_8B = Shape(32, 8, 128, page_size=16, num_layers=32, layer=0)
SERVING = Limits(max_model_len=8192, max_num_seqs=16, max_num_batched_tokens=512, max_logit_rows=64, max_tree_nodes=31)
REBUILD = """
import sys
from pathlib import Path
from tests.targets.test_triton_compiled import build, digests, specs
directory = Path(sys.argv[1])
for name, digest in digests(build("a100", directory, specs()[:2]), directory).items():
    print(name, digest)
"""


@dataclass(frozen=True)
class Built:
    info: TargetInfo
    directory: Path


def specs() -> list[KernelSpec]:
    """Kernels of two models, one of them with quantised output."""
    graphs = (
        attention_graph(SMOLLM2, SERVING, quantise=True),
        node_graph(SERVING, AppendKvSlice(29, 576, 768), kv=kv_type(SMOLLM2), x=(960,), table=(2, 32), tree=TreeType()),
        node_graph(SERVING, RopeSlice(0, 9, 64), x=(960,), table=(2, 32)),
        attention_graph(LLAMA_8B, SERVING),
    )
    return [call.spec for graph in graphs for call in lowered(graph, SERVING).calls]


def build(gpu: str, directory: Path, chosen: Sequence[KernelSpec]) -> TargetInfo:
    return NvidiaTarget(gpu, SERVING).build(chosen, directory)


def attention(shape: Shape, limits: Limits = SERVING) -> Lowering:
    return lowered(attention_graph(shape, limits), limits)


def attention_code(built: Built) -> list[Counter[str]]:
    kernels = [kernel for key, kernel in built.info.kernels.items() if key.startswith("attend_split")]
    return [cubin.sass(built.directory / kernel.file, tools_folder()) for kernel in kernels]


def digests(info: TargetInfo, directory: Path) -> dict[str, str]:
    return {file: hashlib.sha256((directory / file).read_bytes()).hexdigest() for file in info.files}


@pytest.fixture(scope="module", params=["h100", "a100"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    directory = tmp_path_factory.mktemp(request.param)
    return Built(build(request.param, directory, specs()), directory)


def test_every_kernel_has_its_source_and_its_cubin(built: Built) -> None:
    assert set(built.info.kernels) == {spec.key for spec in specs()}
    assert set(built.info.files) == {p.relative_to(built.directory).as_posix() for p in built.directory.rglob("*") if p.is_file()}


def test_no_kernel_spills_or_asks_for_too_much(built: Built) -> None:
    gpu = GPUS[built.info.name]
    for kernel in built.info.kernels.values():
        found = cubin.resources(built.directory / kernel.file, tools_folder())
        assert (found.stack_bytes, found.local_ops) == (0, 0)
        assert found.registers * kernel.resources["threads"] <= gpu.registers
        assert kernel.resources["shared_bytes"] <= gpu.shared_bytes


def test_the_abi_is_the_parameter_table_of_the_cubin(built: Built) -> None:
    sizes = {"null": 8, "i32": 4, "f32": 4}
    for kernel in built.info.kernels.values():
        types = [entry.split(": ")[1] for entry in kernel.abi]
        table = cubin.params((built.directory / kernel.file).read_bytes(), kernel.entry)
        assert [param.bytes for param in table] == [8 if type_.startswith("*") else sizes[type_] for type_ in types]


def test_attention_runs_on_tensor_cores(built: Built) -> None:
    for code in attention_code(built):
        assert cubin.count(code, "HMMA") + cubin.count(code, "HGMMA") > 0


def test_keys_and_values_are_copied_asynchronously_and_16_bytes_at_a_time(built: Built) -> None:
    for code in attention_code(built):
        assert cubin.count(code, "LDGSTS", "128") > cubin.count(code, "LDGSTS") // 2  # the others are page numbers


def test_a_cubin_is_for_its_gpu_and_loads_with_drivers_from_525_on(built: Built) -> None:
    assert built.info.requires == (f"sm_{GPUS[built.info.name].sm}",)
    assert {kernel.resources["min_driver"] for kernel in built.info.kernels.values()} == {525}


def test_nothing_claims_to_have_run_on_a_card(built: Built) -> None:
    assert {kernel.checked_by for kernel in built.info.kernels.values()} == {"interpreted"}


def test_another_process_builds_the_same_bytes_in_another_directory(root: Path, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "elsewhere" / "deeper"
    other = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", REBUILD, there], cwd=root, capture_output=True, text=True, env=other, check=True)
    assert dict(line.split() for line in done.stdout.splitlines()) == digests(build("a100", here, specs()[:2]), here)


def test_generated_files_name_no_path_of_the_build(built: Built) -> None:
    for file in built.info.files:
        assert os.fsencode(built.directory) not in (built.directory / file).read_bytes()


def test_generated_sources_are_lintable(built: Built, root: Path) -> None:
    command = [sys.executable, "-m", "ruff", "check", "--config", root / "pyproject.toml", built.directory]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_importing_the_target_imports_no_compiler(root: Path) -> None:
    code = "import sys, mlsdc.targets.nvidia; sys.exit(any(name in sys.modules for name in ('triton', 'torch', 'tvm')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0


def test_a_parameter_that_a_template_lacks_is_an_error_that_names_kernel_and_template() -> None:
    @dataclass(frozen=True)
    class Nothing:
        key: str = "nothing"

    with pytest.raises(CompileError, match="nothing: templates/triton/attend_split.py.jinja: UndefinedError"):
        render(KernelSpec("attend_split", Nothing(), ()))


def test_a_source_that_does_not_compile_is_an_error_that_names_kernel_and_gpu(tmp_path: Path) -> None:
    spec = attention(SMOLLM2).calls[1].spec
    wrong = replace(spec, abi=tuple(entry.replace("*i32", "i32") for entry in spec.abi))
    with pytest.raises(CompileError, match=f"{spec.key}: k_{spec.key}.py does not compile for sm_90"):
        NvidiaTarget("h100", SERVING).build([wrong], tmp_path)


def test_a_machine_without_triton_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(CompileError, match=r"triton is not installed.*pip install mlsdc\[nvidia\]"):
        build("h100", tmp_path, specs()[:1])


def test_programs_follow_the_rows_and_are_never_more_than_the_worst_batch_needs(built: Built) -> None:
    split, combine = attention(SMOLLM2).calls
    assert (split.count, combine.count) == ("ROWS", "ROWS")
    assert built.info.kernels[split.spec.key].resources["most_programs"] < split.grid * SERVING.max_num_batched_tokens


def test_layers_share_their_kernels() -> None:
    first, last = attention(replace(SMOLLM2, layer=0)), attention(SMOLLM2)
    assert [call.spec for call in first.calls] == [call.spec for call in last.calls]


def test_other_limits_are_another_kernel() -> None:
    assert attention(SMOLLM2).calls[0].spec.key != attention(SMOLLM2, LIMITS).calls[0].spec.key


def test_an_op_without_a_template_is_declined_with_its_name() -> None:
    graph = node_graph(SERVING, Cast(DType.F16), x=(64,))
    assert NvidiaTarget("h100", SERVING).lower(graph["result"], graph) == Declined("'cast' has no Triton template yet")


def test_a_head_size_that_is_no_power_of_two_is_declined() -> None:
    graph = attention_graph(Shape(4, 2, 80), SERVING)
    declined = NvidiaTarget("h100", SERVING).lower(graph["result"], graph)
    assert isinstance(declined, Declined)
    assert "head_dim 80" in declined.why


def test_a_format_without_fragments_is_declined_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlsdc.targets.nvidia_kv.TRITON_FORMATS", ("bf16",))
    graph = attention_graph(Shape(4, 2, 64, format="int8"), SERVING)
    assert NvidiaTarget("h100", SERVING).lower(graph["result"], graph) == Declined("kv format 'int8' has no Triton fragments yet")


def test_types_of_the_abi_are_spelled_as_triton_spells_them() -> None:
    assert [triton_type(t) for t in ("*f32", "f32", "*i64", "*u8")] == ["*fp32", "fp32", "*i64", "*u8"]
