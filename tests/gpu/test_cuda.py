"""The cuda device on a fake driver: arguments, memory, graphs, errors; and a whole model whose kernels the interpreter runs. No GPU."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.device import open_device
from mlsdc.runtime.device.cuda import CudaDevice, CudaLevel
from mlsdc.runtime.device.cuda_driver import Driver, choose, fits
from mlsdc.runtime.device.cuda_program import CudaProgram, input_places, powers
from mlsdc.runtime.errors import ArtifactError, DeviceError
from mlsdc.runtime.manifest import TargetInfo
from mlsdc.runtime.program import ArenaArg
from mlsdc.runtime.step import Header
from mlsdc.targets.cubin import params
from tests.gpu.fake_cuda import OUT_OF_MEMORY, FakeCuda
from tests.gpu.test_interpret import PARAMS, PROMPTS, Said, with_level
from tests.gpu.tiny import VOCAB

PAGES = 40


@pytest.fixture(scope="module")
def artifact(tiny_gpu: Path) -> Artifact:
    return Artifact.open(tiny_gpu)


@pytest.fixture(scope="module")
def h100(artifact: Artifact) -> TargetInfo:
    return next(target for target in artifact.manifest.targets if target.name == "h100")


class Opened:
    def __init__(self, artifact: Artifact, target: TargetInfo, **fake: Any) -> None:
        self.fake = FakeCuda(**fake)
        self.device = CudaDevice(artifact, target, driver=Driver(self.fake))
        self.level: CudaLevel = self.device.load_level("target", PAGES)

    def program(self, name: str) -> CudaProgram:
        program = self.level.programs[name]
        assert isinstance(program, CudaProgram)
        return program

    def header(self, **counts: int) -> None:
        for name, count in counts.items():
            self.level.buffers.header[Header[name]] = count


@pytest.fixture
def opened(artifact: Artifact, h100: TargetInfo) -> Iterator[Opened]:
    opened = Opened(artifact, h100)
    yield opened
    opened.device.close()


# what reaches the GPU


def test_every_launch_matches_the_parameter_table_of_its_cubin(opened: Opened, artifact: Artifact) -> None:
    """The fake driver refuses a wrong count, a wild or misaligned pointer, and shared memory that was not asked for."""
    opened.header(ROWS=3, SEQS=1, OUT=3, COMMITS=2)
    for name in ("forward", "sample", "commit"):
        opened.program(name).run()
    opened.device.synchronise()
    for launched in opened.fake.launched:
        info = opened.device.kernels[launched.entry].info
        table = params(artifact.path(info.file).read_bytes(), info.entry)
        assert [len(value) for value in launched.values] == [param.bytes for param in table]
        assert (launched.threads, launched.shared) == (info.resources["threads"], info.resources["shared_bytes"])
    lists = [program.spec.launches for program in map(opened.program, ("forward", "sample", "commit"))]
    assert [launched.entry for launched in opened.fake.launched] == [launch.kernel for launches in lists for launch in launches]


def test_a_graph_has_the_programs_of_the_smallest_bucket_that_holds_the_step(opened: Opened) -> None:
    embed = opened.program("forward").spec.launches[0].kernel
    for rows, programs in ((1, 1), (3, 4), (17, 32)):
        opened.header(ROWS=rows, SEQS=1, OUT=1)
        opened.program("forward").run()
        assert [launched.grid for launched in opened.fake.launched if launched.entry == embed][-1] == programs


def test_attention_has_no_more_programs_than_the_worst_batch_needs(opened: Opened) -> None:
    opened.header(ROWS=32, SEQS=4, OUT=4)
    opened.program("forward").run()
    split = next(launched for launched in opened.fake.launched if launched.entry.startswith("attend_split"))
    assert split.grid == opened.device.kernels[split.entry].info.resources["most_programs"]


def test_a_program_reads_the_step_buffers_as_they_were_when_it_started(opened: Opened) -> None:
    """Work is done at the next synchronisation, when the host has long written other numbers."""
    buffers, level = opened.level.buffers, opened.level
    buffers.tokens[:3] = 7, 8, 9
    opened.header(ROWS=3, SEQS=1, OUT=1)
    opened.program("forward").start()
    buffers.tokens[:3] = 1, 2, 3
    opened.program("forward").finish()
    found = opened.device.download(level.inputs + level.places["tokens"], 12).view(np.int32)
    assert found.tolist() == [7, 8, 9]


def test_a_commit_is_not_waited_for_and_keeps_its_numbers(opened: Opened) -> None:
    buffers, level = opened.level.buffers, opened.level
    for value in (5, 6):
        buffers.commit_src[0] = value
        opened.header(COMMITS=1)
        opened.program("commit").run()
    found = opened.device.download(level.inputs + level.places["commit_src"], 4).view(np.int32)
    assert (found[0], len(opened.fake.launched)) == (6, 2)


def test_a_device_is_closed_behind_what_was_started(opened: Opened) -> None:
    """A step that broke off, and a commit, which nobody waits for: what they copy to and from is freed when they are done."""
    opened.header(ROWS=3, SEQS=1, OUT=1, COMMITS=1)
    opened.program("forward").start()
    opened.program("commit").run()
    opened.device.close()
    assert not opened.fake.host
    assert len(opened.fake.launched) > 1


def test_a_greedy_step_waits_once(opened: Opened) -> None:
    opened.header(ROWS=1, SEQS=1, OUT=1, COMMITS=1)
    before = opened.fake.calls.count("cuStreamSynchronize")
    opened.program("forward").start()
    opened.program("forward").finish()
    opened.program("commit").run()
    assert opened.fake.calls.count("cuStreamSynchronize") == before + 1


def test_nothing_is_captured_or_loaded_after_load(opened: Opened) -> None:
    before = len(opened.fake.calls)
    opened.header(ROWS=5, SEQS=1, OUT=5, COMMITS=1)
    opened.program("forward").run()
    assert set(opened.fake.calls[before:]) == {"cuCtxSetCurrent", "cuGraphLaunch", "cuStreamSynchronize"}


def test_one_copy_brings_the_inputs_of_a_forward_pass(opened: Opened) -> None:
    assert len(opened.program("forward")._runs) == 1


def test_of_large_sampling_inputs_only_what_is_used_is_copied(opened: Opened) -> None:
    opened.header(ROWS=1, SEQS=1, OUT=1)
    assert list(opened.program("sample")._used("seen_ids", {"ROWS": 1, "SEQS": 1, "OUT": 1})) == []
    opened.level.buffers.sampling[0].view(np.int32)[19] = 3
    ((offset, part),) = opened.program("sample")._used("seen_ids", {"ROWS": 1, "SEQS": 1, "OUT": 1})
    assert (offset, len(part)) == (0, 3)


def test_weights_arrive_byte_for_byte(opened: Opened, artifact: Artifact) -> None:
    file = artifact.weights("target")
    for name in file.tensors:
        expected = file.tensor(name).reshape(-1)
        assert np.array_equal(opened.device.download(opened.level.weights[name], len(expected)), expected)


def test_pages_are_written_and_read(opened: Opened) -> None:
    data = np.arange(opened.level.page_bytes, dtype=np.uint64).astype(np.uint8)
    opened.level.write_page(3, data)
    assert np.array_equal(opened.level.read_page(3), data)
    assert not opened.level.read_page(2).any()


def test_a_level_takes_two_allocations_and_gives_all_memory_back(artifact: Artifact, h100: TargetInfo) -> None:
    opened = Opened(artifact, h100)
    assert len(opened.fake.memory) == 2
    opened.device.close()
    opened.device.close()
    assert not opened.fake.memory
    assert not opened.fake.host


def test_a_profile_names_every_launch(opened: Opened) -> None:
    opened.header(ROWS=1, SEQS=1, OUT=1)
    program = opened.program("forward")
    assert [row[:2] for row in program.profile()] == [(launch.node, launch.kernel) for launch in program.spec.launches]


# a whole model


def test_texts_through_graphs_and_the_fake_driver_are_the_cpus(root: Path, tmp_path: Path, tiny_gpu: Path, tiny_cpu: Path) -> None:
    cpu: Said = with_level(tiny_cpu, None)
    texts = [prompt + text for prompt, text in zip(PROMPTS, cpu.texts, strict=True)]
    job = tmp_path / "job.pickle"
    job.write_bytes(pickle.dumps({"pages": PAGES, "texts": texts, "vocab": VOCAB, "prompts": PROMPTS, "params": PARAMS}))
    command = [sys.executable, "-m", "tests.gpu.run_cuda", str(tiny_gpu), str(job)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env={**os.environ, "TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["texts"] == cpu.texts
    assert found["left"] == 0


# what is refused


def refused(artifact: Artifact, target: TargetInfo, **fake: Any) -> str:
    with pytest.raises((DeviceError, ArtifactError)) as caught:
        Opened(artifact, target, **fake)
    return str(caught.value)


def test_too_old_a_driver(artifact: Artifact, h100: TargetInfo) -> None:
    message = refused(artifact, h100, version=11080)
    assert message == ("the NVIDIA driver speaks CUDA 11.8, target h100 needs CUDA 12.0 (driver 525 or newer): update the driver")


def test_another_architecture(artifact: Artifact, h100: TargetInfo) -> None:
    assert refused(artifact, h100, sm=80) == "target h100 is for sm_90, cuda:0 (Fake GPU) is sm_80"


def test_a_gpu_that_is_not_there(artifact: Artifact, h100: TargetInfo) -> None:
    assert refused(artifact, replace(h100, device="cuda:1")) == "device 'cuda:1': this machine has 1 GPU"


def test_a_driver_without_a_gpu(artifact: Artifact, h100: TargetInfo) -> None:
    assert refused(artifact, h100, devices=0).startswith("the NVIDIA driver finds no GPU: ")


def test_too_little_memory_is_found_out_before_anything_is_allocated(artifact: Artifact, h100: TargetInfo) -> None:
    fake = FakeCuda(free=100_000)
    device = CudaDevice(artifact, h100, driver=Driver(fake))
    expected = r"cuda:0 \(Fake GPU\): level 'target' needs .* \(weights .*, arena .*, inputs .*, kv pool .*\), 100,000 of "
    with pytest.raises(DeviceError, match=expected):
        device.load_level("target", PAGES)
    assert not fake.memory
    device.close()


def test_memory_that_went_to_others_since_it_was_counted(artifact: Artifact, h100: TargetInfo) -> None:
    fake = FakeCuda()
    device = CudaDevice(artifact, h100, driver=Driver(fake))
    fake.cuMemAlloc_v2 = lambda pointer, size: OUT_OF_MEMORY  # type: ignore[method-assign]
    with pytest.raises(DeviceError) as caught:
        device.load_level("target", PAGES)
    assert re.fullmatch(r"[\d,]+ bytes of the GPU, of which 1,073,741,824 are free: cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY "
                        r"\(out of memory\): lower memory.kv_pool or limits, or free the GPU", str(caught.value))
    device.close()


def test_a_kernel_that_wants_more_shared_memory_than_there_is(artifact: Artifact, h100: TargetInfo) -> None:
    assert "bytes of shared memory, Fake GPU gives 1024: compile for it" in refused(artifact, h100, shared=1024)


def test_an_argument_that_is_not_aligned(artifact: Artifact, h100: TargetInfo) -> None:
    opened = Opened(artifact, h100)
    spec = opened.program("forward").spec
    launch = spec.launches[0]
    wrong = replace(spec, launches=(replace(launch, args=(*launch.args[:-1], ArenaArg(8))),))
    with pytest.raises(ArtifactError, match="an argument of '.*' lies at 0x.*, not at a multiple of 16; compile again"):
        CudaProgram(opened.level, wrong)
    opened.device.close()


def test_a_launch_with_too_few_arguments(artifact: Artifact, h100: TargetInfo) -> None:
    opened = Opened(artifact, h100)
    spec = opened.program("forward").spec
    wrong = replace(spec, launches=(replace(spec.launches[0], args=spec.launches[0].args[1:]),))
    with pytest.raises(ArtifactError, match="takes 4 arguments, the launch has 3; compile again"):
        CudaProgram(opened.level, wrong)
    opened.device.close()


def test_a_machine_without_a_driver_says_so(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLSDC_LIBCUDA", "libcuda-that-is-not-there.so")
    with pytest.raises(ArtifactError, match=r"tiny.mlsdc: built for .*; no NVIDIA driver: cannot load libcuda-that-is-not-there.so"):
        artifact.pick_target("auto")


def test_a_library_that_is_no_driver_says_so(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLSDC_LIBCUDA", "libm.so.6")
    with pytest.raises(ArtifactError, match=r"libm.so.6 \(MLSDC_LIBCUDA\) is no NVIDIA driver: it has no cuInit"):
        artifact.pick_target("auto")


def test_a_device_number_that_is_none(artifact: Artifact) -> None:
    with pytest.raises(ArtifactError, match="device 'cuda:one': expected a number such as cuda:1"):
        artifact.pick_target("cuda:one")


def test_a_kind_of_device_that_is_none(artifact: Artifact, h100: TargetInfo) -> None:
    with pytest.raises(DeviceError, match="this runtime has no 'tpu' device; it has cpu, cuda, interpret"):
        open_device(artifact, replace(h100, device="tpu"))


# choosing


@pytest.mark.parametrize(
    ("requires", "capability", "expected"),
    [("sm_90", 90, True), ("sm_90", 100, False), ("sm_80", 80, True), ("sm_80", 86, True), ("sm_80", 89, True), ("sm_89", 86, False),
     ("sm_80", 90, False), ("sm_120", 121, False), ("sm_100", 100, True)])
def test_code_from_9_0_on_is_for_one_architecture(requires: str, capability: int, expected: bool) -> None:
    assert fits((requires,), capability) == expected


def test_of_several_codes_one_is_chosen_that_the_driver_loads(artifact: Artifact, h100: TargetInfo) -> None:
    newer = replace(h100, name="newer", requires=("sm_89",), kernels={
        key: replace(info, resources={**info.resources, "min_driver": 580}) for key, info in h100.kernels.items()})
    older = replace(h100, name="older", requires=("sm_80",))
    assert choose([newer, older], 0, Driver(FakeCuda(sm=89, version=12040))).name == "older"
    assert choose([newer, older], 0, Driver(FakeCuda(sm=89, version=13000))).name == "newer"
    with pytest.raises(DeviceError, match=r"CUDA 12.4, target newer needs CUDA 13.0 \(driver 580 or newer\): update the driver"):
        choose([newer], 0, Driver(FakeCuda(sm=89, version=12040)))


@pytest.mark.parametrize(("sm", "name"), [(90, "h100"), (80, "a100"), (86, "a100")])
def test_the_closest_code_is_chosen(artifact: Artifact, sm: int, name: str) -> None:
    assert choose(artifact.manifest.targets, 0, Driver(FakeCuda(sm=sm))).name == name


def test_no_code_for_the_gpu_is_an_error(artifact: Artifact) -> None:
    with pytest.raises(DeviceError, match=r"built for .*, cuda:0 \(Fake GPU\) is sm_75: compile for it"):
        choose(artifact.manifest.targets, 0, Driver(FakeCuda(sm=75)))


def test_buckets_are_powers_of_two_and_the_limit() -> None:
    assert powers(56) == [1, 2, 4, 8, 16, 32, 56]
    assert powers(1) == [1]


def test_places_of_inputs_do_not_overlap() -> None:
    places, end = input_places({"header": 64, "tokens": 100, "choices": 8}, [])
    assert places == {"header": 0, "tokens": 256, "choices": 512}
    assert end == 768
