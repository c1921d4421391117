"""Attention in CUDA C++: its source as C++ on a CPU against the float64 reference, and what NVRTC makes of it. Nothing ran on a card."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlsdc.compiler.errors import CompileError
from mlsdc.runtime.kv_numbers import rotate
from mlsdc.runtime.step import BLOCK, Limits
from mlsdc.targets import cubin, nvrtc_build
from mlsdc.targets.hardware import GPUS
from mlsdc.targets.nvidia import NvidiaTarget
from mlsdc.targets.protocol import Declined, KernelSpec, Lowering
from mlsdc.templates.params_cuda import AttendCuda
from tests.targets.attention_vectors import LIMITS, Case, Sequence, Shape, drafted, lay_out, prefilled, random_batch, random_parents
from tests.targets.cuda_machine import Array, HostKernel, combined, run_split
from tests.targets.interpret_attention import attention_graph

# Queries and probabilities have 16 bits of mantissa; queries that meet int8 have 15 bits of their row's largest, those that meet e4m3 12.
EXACT, BYTES = 1e-5, 6e-5
SHAPES = {
    "smollm2": (Shape(9, 3, 64, page_size=32), EXACT),
    "8B": (Shape(4, 1, 128, page_size=16, num_layers=3, layer=0), EXACT),
    "group of 8, window, sinks": (Shape(8, 1, 64, page_size=64, window=70, sinks=5), EXACT),
    "softcap": (Shape(2, 2, 64, page_size=16, softcap=2.0, window=40), EXACT),
    "int8": (Shape(3, 1, 64, page_size=32, format="int8"), BYTES),
    "fp8": (Shape(4, 1, 128, page_size=16, format="fp8"), BYTES),
    "int4 by token": (Shape(2, 1, 64, page_size=64, format="int4-token"), EXACT),
    "mixed": (Shape(8, 2, 128, page_size=32, format="int4-token/fp8"), EXACT),
    "mixed bf16": (Shape(2, 2, 64, page_size=32, num_layers=3, format="fp8@0=bf16@1=int8/bf16"), BYTES),
}
SMALL = Shape(2, 1, 64, page_size=16)
SERVING = Limits(max_model_len=8192, max_num_seqs=16, max_num_batched_tokens=512, max_logit_rows=64, max_tree_nodes=31)
FULL_TREE = replace(LIMITS, max_num_batched_tokens=64, max_tree_nodes=63, max_num_seqs=1)
MUTATIONS = {  # of SMALL's source: what stands there, what shall stand there
    "blocks are not waited for": ("            barrier_wait(FULL + 8 * ((block + 1) % STAGES), (block + 1) / STAGES & 1);\n", ""),
    "probabilities are read before all warps stored them": (
        "        written_for_wgmma();\n        named_sync(3 + consumer, 128);\n#pragma unroll\n        for (int i = 0; i < TILES * N / 2", (
            "        written_for_wgmma();\n#pragma unroll\n        for (int i = 0; i < TILES * N / 2")),
    "strides of the probabilities are the other way round": ("COLUMNS * 16, 128));", "128, COLUMNS * 16));"),
    "strides of the queries are the other way round": ("128, QUERY_TILE));", "QUERY_TILE, 128));"),
    "what is not there is weighed": ("values[i][j] &= there(valid, i % 4, j / 2);", ";"),
}


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def target(limits: Limits, gpu: str = "h100") -> NvidiaTarget:
    chosen = NvidiaTarget(gpu, limits, exact=False)
    assert chosen.choose_attention("nvrtc") is None
    return chosen


def lowered(shape: Shape, limits: Limits) -> Lowering:
    graph = attention_graph(shape, limits)
    lowering = target(limits).lower(graph["result"], graph)
    assert isinstance(lowering, Lowering), lowering
    return lowering


def split_of(lowering: Lowering) -> KernelSpec:
    return next(call.spec for call in lowering.calls if nvrtc_build.is_cuda(call.spec))


@dataclass(frozen=True)
class Host:
    """A shape's kernel on the CPU."""

    lowering: Lowering
    kernel: HostKernel

    def states(self, case: Case, **how: bool) -> tuple[Array, Array, Array]:
        return run_split(self.kernel, self.lowering, case, **how)

    def rows(self, case: Case, **how: bool) -> Array:
        out = combined(self.kernel, case, self.states(case, **how))
        combine: Any = self.lowering.calls[-1].spec.params
        return rotate(out.astype(np.float32)) if combine.rotated else out


def host(shape: Shape, folder: Path, limits: Limits = LIMITS) -> Host:
    lowering = lowered(shape, limits)
    return Host(lowering, HostKernel(split_of(lowering), folder))


def error(found: Array, case: Case) -> float:
    return float(np.linalg.norm(found - case.expected) / np.linalg.norm(case.expected))


def small_batch() -> list[Sequence]:
    """A tree across a block border, a chunk of a prompt that two consumers share, a plain decode step."""
    return [drafted(rng(1), SMALL, 62, (-1, 0, 0, 1, -1, 3, 2)), prefilled(rng(2), SMALL, 60, 21), drafted(rng(3), SMALL, 130, ())]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Host:
    return host(SMALL, tmp_path_factory.mktemp("small"))


@pytest.mark.parametrize("name", SHAPES)
def test_attention_equals_the_float64_reference(name: str, tmp_path: Path) -> None:
    shape, close = SHAPES[name]
    case = lay_out(shape, random_batch(rng(len(name)), shape))
    assert error(host(shape, tmp_path).rows(case), case) < close


def test_a_full_tree_reads_every_slot(tmp_path: Path) -> None:
    case = lay_out(SMALL, [drafted(rng(4), SMALL, 30, random_parents(rng(5), 63))], limits=FULL_TREE)
    assert error(host(SMALL, tmp_path, FULL_TREE).rows(case), case) < EXACT


def test_the_states_do_not_depend_on_the_order_of_threads_or_on_when_copies_arrive(small: Host) -> None:
    case = lay_out(SMALL, small_batch())
    late, early, backwards = small.states(case), small.states(case, late=False), small.states(case, backwards=True)
    for other in (early, backwards):
        assert all(np.array_equal(a.view(np.uint32), b.view(np.uint32)) for a, b in zip(late, other, strict=True))


@pytest.mark.parametrize("m", [1, 2, 5, 8])
def test_a_row_has_the_same_bits_in_a_batch_of_m(small: Host, m: int) -> None:
    tree = small_batch()[0]
    first = small.rows(lay_out(SMALL, [tree.only(range(m))], pages_seed=m))
    assert np.array_equal(first, small.rows(lay_out(SMALL, small_batch()))[:m])


def test_a_row_has_the_same_bits_in_other_pages_another_order_and_for_any_chunking(small: Host) -> None:
    tree, chunk, decode = small_batch()
    there = small.rows(lay_out(SMALL, [decode, chunk.only(range(9)), chunk.only(range(9, 21)), tree], pages_seed=99))
    rows = small.rows(lay_out(SMALL, [tree, chunk, decode]))
    assert np.array_equal(np.concatenate([there[22:], there[1:22], there[:1]]), rows)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_machine_sees_what_is_wrong(mutation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel without one of its waits, or with strides exchanged, stops or computes something else."""
    old, new = MUTATIONS[mutation]
    text = nvrtc_build.render(split_of(lowered(SMALL, LIMITS)))
    assert old in text
    monkeypatch.setattr("tests.targets.cuda_machine.render", lambda spec: text.replace(old, new))
    case = lay_out(SMALL, small_batch())
    wrong = host(SMALL, tmp_path)
    with pytest.raises(AssertionError):  # noqa: PT012 (either of them may stop it)
        for backwards in (False, True):
            assert error(wrong.rows(case, backwards=backwards), case) < EXACT


# What NVRTC makes of it


COMPILED = {
    "bf16 smollm2": Shape(9, 3, 64, page_size=32),
    "bf16 8B": Shape(32, 8, 128, page_size=16),
    "bf16 group of 8": Shape(16, 2, 64, page_size=16),
    "int8 8B": Shape(32, 8, 128, page_size=16, format="int8"),
    "fp8 8B": Shape(32, 8, 128, page_size=32, format="fp8"),
    "int4-token 8B": Shape(32, 8, 128, page_size=64, format="int4-token"),
}
SCORES = {"bf16": "HGMMA", "int4-token": "HGMMA", "int8": "IGMMA", "fp8": "QGMMA"}


@dataclass(frozen=True)
class Built:
    spec: KernelSpec
    used: dict[str, int]
    cubin: bytes
    code: Counter[str]


@pytest.fixture(scope="module", params=COMPILED)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    pytest.importorskip("triton", reason="triton, whose cuobjdump and nvdisasm are used, is not installed (pip install mlsdc[nvidia])")
    from mlsdc.targets.triton_build import tools_folder

    spec = split_of(lowered(COMPILED[request.param], SERVING))
    data, used = nvrtc_build.fitting(spec, GPUS["h100"], nvrtc_build.render(spec))
    file = tmp_path_factory.mktemp("nvrtc") / "kernel.cubin"
    file.write_bytes(data)
    return Built(spec, used, data, cubin.sass(file, tools_folder()))


def test_it_fits_the_machine_without_spills(built: Built) -> None:
    assert (built.used["stack_bytes"], cubin.count(built.code, "LDL"), cubin.count(built.code, "STL")) == (0, 0, 0)
    assert built.used["shared_bytes"] <= 227 * 1024
    assert built.used["registers"] * built.used["threads"] <= GPUS["h100"].registers


def test_scores_and_results_run_on_the_tensor_cores_of_hopper(built: Built) -> None:
    params: Any = built.spec.params
    widths, tiles = len(params.widths), params.geometry.head_dim // 64
    steps, terms = params.key_steps, params.query_terms
    scores = 2 * widths * steps * terms  # before the first block, and before each next one
    values = widths * 4 * tiles * 2
    scored = SCORES[params.format]
    assert cubin.count(built.code, "HGMMA") == values + (scores if scored == "HGMMA" else 0)
    assert cubin.count(built.code, scored) == scores + (values if scored == "HGMMA" else 0)


def test_blocks_are_brought_by_bulk_copies_and_waited_for_by_barriers(built: Built) -> None:
    assert cubin.count(built.code, "UBLKCP") > 0
    assert sum(times for name, times in built.code.items() if name.startswith("SYNCS.PHASECHK")) > 0
    assert cubin.count(built.code, "USETMAXREG") > 0


def test_tensor_cores_are_not_serialised_for_want_of_registers(built: Built) -> None:
    """ptxas puts a wait behind each instruction then: there are as many waits as groups of instructions that the source has."""
    params: Any = built.spec.params
    turns = 2 * len(params.widths) * (params.query_terms if params.scored == "e4m3" else 1)  # scores, with the values of the block before
    waits = sum(times for name, times in built.code.items() if name.startswith("WARPGROUP.DEPBAR"))
    assert waits <= turns + len(params.widths)


def test_its_arguments_are_the_parameter_table_of_the_cubin(built: Built) -> None:
    assert [param.bytes for param in cubin.params(built.cubin, built.spec.key)] == [8] * (len(built.spec.abi) + 2)  # and two null pointers


def test_drivers_from_525_on_load_it(built: Built) -> None:
    assert built.used["min_driver"] == 525


def test_another_process_builds_the_same_bytes_in_another_directory(root: Path, tmp_path: Path) -> None:
    code = ("import hashlib\nfrom tests.targets.test_cuda_attention import *\nspec = split_of(lowered(SMALL, SERVING))\n"
            "print(hashlib.sha256(nvrtc_build.compile_source(spec.key, nvrtc_build.render(spec))).hexdigest())\n")
    other = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=other, check=True)
    spec = split_of(lowered(SMALL, SERVING))
    here = nvrtc_build.compile_source(spec.key, nvrtc_build.render(spec))
    assert done.stdout.strip() == hashlib.sha256(here).hexdigest()


def test_it_takes_what_the_triton_kernel_takes() -> None:
    for shape in COMPILED.values():
        graph = attention_graph(shape, SERVING)
        triton = NvidiaTarget("h100", SERVING).lower(graph["result"], graph)
        assert isinstance(triton, Lowering)
        cuda = lowered(shape, SERVING)
        assert [(call.spec.abi, call.args, call.grid, call.count, call.grain) for call in cuda.calls] == [
            (call.spec.abi, call.args, call.grid, call.count, call.grain) for call in triton.calls]
        assert cuda.temps == triton.temps


def test_the_record_of_what_ran_on_a_cpu_is_of_these_templates() -> None:
    """After a change of templates/cuda: run this file's other tests, then write the digest into nvrtc_build.EMULATED."""
    assert nvrtc_build.digest() == nvrtc_build.EMULATED
    assert nvrtc_build.checked_by() == "emulated"


# What is refused


@pytest.mark.parametrize(("shape", "why"), [
    (Shape(4, 2, 32), "head_dim 32; it does 64 and 128"),
    (Shape(4, 2, 64, page_size=64, format="int4"), "kv format 'int4'; it does bf16, int8, fp8, int4-token"),
    (Shape(64, 1, 128), "64 query heads of a kv head; it does up to 32 with head_dim 128"),
])
def test_what_it_does_not_do_is_declined_by_name(shape: Shape, why: str) -> None:
    graph = attention_graph(shape, SERVING)
    wanted = f"attention by nvrtc does not do {why}: leave out 'kernels: {{attention: nvrtc}}'"
    assert target(SERVING).lower(graph["result"], graph) == Declined(wanted)


def test_other_architectures_and_exact_rows_are_refused() -> None:
    other = NvidiaTarget("a100", SERVING, exact=False)
    assert other.choose_attention("nvrtc") == "is for h100 and h200 (sm_90), 'a100' is sm_80"
    assert other.attention == "triton"
    why = NvidiaTarget("h100", SERVING).choose_attention("nvrtc")
    assert why is not None
    assert "write target: {exact: false}" in why


def test_without_the_option_attention_is_tritons() -> None:
    graph = attention_graph(SMALL, SERVING)
    lowering = NvidiaTarget("h100", SERVING, exact=False).lower(graph["result"], graph)
    assert isinstance(lowering, Lowering)
    assert not any(isinstance(call.spec.params, AttendCuda) for call in lowering.calls)


def test_a_machine_without_nvrtc_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc_build, "PACKAGE", "nvidia-cuda-nvrtc-nowhere")
    nvrtc_build.library.cache_clear()
    with pytest.raises(CompileError, match=r"is not installed, .* needs 12\.9\.86: pip install 'mlsdc\[nvrtc\]'"):
        nvrtc_build.library()


def test_another_nvrtc_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc_build, "VERSION", "11.8.89")
    nvrtc_build.library.cache_clear()
    with pytest.raises(CompileError, match=r"12\.9\.86 is installed, .* needs 11\.8\.89"):
        nvrtc_build.library()


def test_a_source_that_does_not_compile_is_one_line_that_names_kernel_and_place() -> None:
    with pytest.raises(CompileError, match=r"^wrong: k_wrong\.cu does not compile for sm_90a: k_wrong\.cu\(1\): error: .*nothing"):
        nvrtc_build.compile_source("wrong", "__device__ int x = nothing;\n")


def test_a_kernel_that_spills_is_refused() -> None:
    spilling = cubin.Resources(168, 16, 0, 3, 8, 8)
    assert nvrtc_build.misfit(spilling, 1024, 384, GPUS["h100"]) == "spills (16 bytes of stack, 3 local loads and stores)"
    plain = cubin.Resources(168, 0, 0, 0, 8, 0)
    assert nvrtc_build.misfit(plain, 1024, 384, GPUS["h100"]) == "it has no tensor-core instructions or no bulk copies"
    whole = cubin.Resources(168, 0, 0, 0, 8, 8)
    assert "232449 bytes of shared memory" in str(nvrtc_build.misfit(whole, 232449, 384, GPUS["h100"]))
    assert nvrtc_build.misfit(whole, 1024, 512, GPUS["h100"]) == "168 registers x 512 threads, 65536 there are"
    assert nvrtc_build.misfit(whole, 1024, 384, GPUS["h100"]) is None


def test_a_block_of_positions_is_copied_once() -> None:
    """Every byte of 64 tokens' keys, values and numbers, to places of a stage that do not meet."""
    for shape in COMPILED.values():
        params = split_of(lowered(shape, SERVING)).params
        assert isinstance(params, AttendCuda)
        copied = sum(copy.count * copy.bytes for copy in params.copies)
        kv = params.kv
        assert copied * shape.page_size == BLOCK * sum(b.block_bytes(shape.page_size, shape.head_dim) for b in (kv.keys, kv.values))
        places = sorted((copy.at + i * copy.pitch, copy.bytes) for copy in params.copies for i in range(copy.count))
        ends = [at + size for at, size in places]
        assert all(end <= start for end, (start, _) in zip(ends, [*places[1:], (params.stage_bytes, 0)], strict=True))
        assert all(at % 16 == 0 and size % 16 == 0 for at, size in places)
