"""A whole artifact whose prompts' linears copy by TMA (kernels: {linear: tma}): kernels, launches, texts, what is refused."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlsdc.compiler.errors import CompileError, ConfigError
from mlsdc.compiler.roofline_shapes import SHAPES, shape_graph
from mlsdc.passes.emit_program import emit_program
from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.device.cuda import CudaDevice, CudaLevel
from mlsdc.runtime.device.cuda_driver import Driver
from mlsdc.runtime.device.cuda_program import BoundLaunch, CudaProgram
from mlsdc.runtime.errors import ArtifactError
from mlsdc.runtime.manifest import KernelInfo
from mlsdc.runtime.program import Mapped, TensorMapArg
from mlsdc.runtime.sampling_params import SamplingParams
from mlsdc.runtime.step import Header, Limits
from mlsdc.runtime.tensor_map import param_bytes, tiles_of
from mlsdc.targets import cubin
from mlsdc.targets.nvidia import NvidiaTarget
from mlsdc.targets.triton_build import check_maps, tools_folder
from tests.gpu.fake_cuda import FakeCuda
from tests.gpu.tiny import LIMITS, VOCAB, config
from tests.once import once

TMA = {"linear": "tma", "variants": False}
PROMPT = list(b"a prompt of more than 64 tokens, so that graphs for many rows run: " * 2)[:90]
TENSOR_OPS = {"h100": ("HGMMA", "IGMMA"), "b200": ("UTCHMMA", "UTCIMMA"), "rtx5090": ("HMMA", "IMMA")}
WIDER = {**LIMITS, "max_num_batched_tokens": 128}


def options(model: Path, hardware: str, **target: Any) -> dict[str, Any]:
    return config(model, hardware, **target) | {"limits": WIDER}


@pytest.fixture(scope="session", params=["int8", "bf16"])
def tiny_tma(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """`tma.mlsdc` for h100 and `cpu.mlsdc`, of the tiny model with one kind of weights; read only."""
    pytest.importorskip("triton", reason="triton is not installed (pip install mlsdc[nvidia])")
    from mlsdc.compiler import compile_model

    def make(folder: Path) -> None:
        compile_model(options(tiny_model, "h100", weights=request.param, exact=False) | {"kernels": TMA}, folder / "tma.mlsdc")
        compile_model(options(tiny_model, "cpu-native", weights=request.param), folder / "cpu.mlsdc")

    return once(tmp_path_factory, f"gpu-tiny-tma-{request.param}", make)


@pytest.fixture
def artifact(tiny_tma: Path) -> Artifact:
    return Artifact.open(tiny_tma / "tma.mlsdc")


def mapped(artifact: Artifact) -> list[KernelInfo]:
    return [info for info in artifact.manifest.targets[0].kernels.values() if "_tma_" in info.entry]


@pytest.fixture
def level(artifact: Artifact) -> Iterator[tuple[FakeCuda, CudaLevel]]:
    fake = FakeCuda()
    device = CudaDevice(artifact, artifact.manifest.targets[0], driver=Driver(fake))
    yield fake, device.load_level("target", 40)
    device.close()


def check_code(root: Path, kernels: Iterable[KernelInfo], gpu: str = "h100") -> None:
    for info in kernels:
        code = cubin.sass(root / info.file, tools_folder())
        assert cubin.count(code, "UTMALDG") >= 4  # two operands, at least two stages
        assert cubin.count(code, "LDGSTS") == 0
        assert sum(cubin.count(code, name) for name in TENSOR_OPS[gpu]) > 0
        assert info.resources["stack_bytes"] == 0
        assert info.resources["async_copies"] == cubin.count(code, "UTMALDG")
        if gpu != "rtx5090":  # two programs a multiprocessor
            assert 2 * (info.resources["shared_bytes"] + 1024) <= 228 * 1024
            assert 2 * info.resources["registers"] * info.resources["threads"] <= 65536


def test_its_kernels_copy_by_tma_to_wgmma_without_spills(artifact: Artifact) -> None:
    assert {info.entry.split("_tma_")[0].removesuffix("_q") for info in mapped(artifact)} == {"linear", "gated"}
    check_code(artifact.root, mapped(artifact))


@pytest.mark.parametrize(("gpu", "weights"), [("h100", "int8"), ("h100", "bf16"), ("b200", "int8"), ("b200", "bf16"), ("rtx5090", "bf16")])
def test_those_of_an_8b_shape_do_too(tmp_path: Path, gpu: str, weights: str) -> None:
    limits = Limits(max_model_len=8192, max_num_seqs=16, max_num_batched_tokens=512, max_logit_rows=64, max_tree_nodes=31)
    target = NvidiaTarget(gpu, limits, exact=False)
    assert target.choose_linear("tma") is None
    shape = replace(SHAPES["llama-3-8b"], layers=1)
    _, specs = emit_program(shape_graph(shape, limits, weights), target, "forward", "target")
    chosen = [spec for spec in specs if "_tma_" in spec.key]
    assert len(chosen) == 4  # qkv, out, gate and up, down
    check_code(tmp_path, target.build(chosen, tmp_path).kernels.values(), gpu)


def test_no_other_kernel_does(artifact: Artifact) -> None:
    for info in artifact.manifest.targets[0].kernels.values():
        if info.entry.startswith(("linear", "gated")) and info not in mapped(artifact):
            assert cubin.count(cubin.sass(artifact.path(info.file), tools_folder()), "UTMALDG") == 0


def test_a_map_is_128_bytes_then_sizes_then_strides_in_the_cubins_table(artifact: Artifact) -> None:
    for info in mapped(artifact):
        table = cubin.params(artifact.path(info.file).read_bytes(), info.entry)
        wanted = [size for entry in info.abi for size in param_bytes(entry.split(": ")[1])]
        assert [param.bytes for param in table] == wanted
        assert wanted.count(128) == 2


def test_the_programs_file_says_of_a_map_what_it_is_of(artifact: Artifact) -> None:
    (spec,) = [program for name, program in artifact.programs("target", artifact.manifest.targets[0]).items() if name == "forward"]
    args = [arg for launch in spec.launches if "_tma_" in launch.kernel for arg in launch.args]
    maps = [arg for arg in args if isinstance(arg, TensorMapArg)]
    assert len(maps) == 2 * sum("_tma_" in launch.kernel for launch in spec.launches)
    assert all(arg.map.of in args for arg in maps)  # beside the map the pointer is given, too: what reads weights is counted by it
    assert type(spec).from_json(spec.to_json(), "here") == spec


def test_maps_are_encoded_once_at_load_and_launches_give_them(level: tuple[FakeCuda, CudaLevel]) -> None:
    """The fake driver refuses a map that breaks a limit, and a launch whose sizes and strides are not the map's."""
    fake, memory = level
    encoded = fake.calls.count("cuTensorMapEncodeTiled")
    assert encoded == len(fake.maps) > 0
    for rows, expected in ((90, True), (20, False)):
        fake.launched.clear()
        for name, count in {"ROWS": rows, "SEQS": 1, "OUT": 1}.items():
            memory.buffers.header[Header[name]] = count
        memory.programs["forward"].run()
        memory.device.synchronise()
        assert any("_tma_" in each.entry for each in fake.launched) is expected
    assert fake.calls.count("cuTensorMapEncodeTiled") == encoded


def test_texts_through_it_and_the_fake_driver_are_the_cpus(root: Path, tmp_path: Path, tiny_tma: Path) -> None:
    from mlsdc.runtime.engine import Engine

    asked = [SamplingParams(max_tokens=3, ignore_eos=True)]
    with Engine.load(tiny_tma / "cpu.mlsdc", device="cpu", num_pages=40) as engine:
        said = [list(result.token_ids) for result in engine.generate([PROMPT], asked)]
    job = tmp_path / "job.pickle"
    job.write_bytes(pickle.dumps({"pages": 40, "texts": [PROMPT + said[0]], "vocab": VOCAB, "prompts": [PROMPT], "params": asked}))
    command = [sys.executable, "-m", "tests.gpu.run_cuda", str(tiny_tma / "tma.mlsdc"), str(job)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env={**os.environ, "TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout)
    assert told["texts"] == said
    assert any("_tma_" in entry for entry in told["entries"])


@pytest.mark.parametrize("hardware", ["a100", "l40s", "cpu-native"])
def test_other_machines_are_an_error_at_its_key(tiny_model: Path, tmp_path: Path, hardware: str) -> None:
    from mlsdc.compiler import compile_model

    with pytest.raises(ConfigError, match=r"kernels\.linear: tma: is for b200, h100, h200 and rtx5090 \(sm_90, sm_100, sm_120\), '.*' is "):
        compile_model(config(tiny_model, hardware) | {"kernels": TMA}, tmp_path / "never.mlsdc")


@pytest.mark.parametrize(("shape", "message"), [
    ((96,), "1 axes, tiles have"), ((8, 6), "are not multiples of 16 below"), ((0, 96), "is not 1 to")])
def test_a_tensor_that_no_map_can_be_of_is_one_line(level: tuple[FakeCuda, CudaLevel], shape: tuple[int, ...], message: str) -> None:
    _, memory = level
    program = memory.programs["forward"]
    assert isinstance(program, CudaProgram)
    bound = next(each.launch for each in program.launches if each.launch.kernel.startswith(("linear_tma", "linear_q_tma")))
    first = bound.args[0]
    assert isinstance(first, TensorMapArg)
    changed = replace(bound, args=(TensorMapArg(Mapped(first.map.of, shape)), *bound.args[1:]))
    with pytest.raises(ArtifactError, match=f"{message}.*; compile again"):
        BoundLaunch(memory, changed)


@pytest.mark.parametrize(("type_", "box", "swizzle"), [
    ("map bf16[128, 64]", (128, 64), 3), ("map f32[64, 64]", (64, 32), 3), ("map u8[8, 1, 16, 32]", (8, 1, 16, 32), 1),
    ("map f16[64, 32]", (64, 32), 2)])
def test_a_box_has_rows_of_at_most_128_bytes_and_the_swizzle_of_its_rows(type_: str, box: tuple[int, ...], swizzle: int) -> None:
    tiles = tiles_of(type_)
    assert tiles is not None
    assert (tiles.box, tiles.swizzle) == (box, swizzle)


def test_other_boxes_than_tritons_do_not_build() -> None:
    from types import SimpleNamespace

    from mlsdc.targets.protocol import KernelSpec

    spec = KernelSpec("linear_tma", SimpleNamespace(key="k"), ("x_map: map f32[64, 64]",))  # type: ignore[arg-type]
    meta = {"block_size": [64, 64], "swizzle": 3, "elem_size": 4, "fp4_padded": False}
    with pytest.raises(CompileError, match=r"k: tensor maps of boxes .* are given, Triton wants"):
        check_maps(spec, SimpleNamespace(tensordesc_meta=[meta]))
