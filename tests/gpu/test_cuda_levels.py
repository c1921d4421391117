"""Levels with programs and a grouped cache on the fake driver: what is captured at load, and how often a step waits for the GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from mlsdc.compiler.cli_gpu_drafts import check_drafts
from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.device import cuda_driver
from mlsdc.runtime.device.cuda_program import CudaProgram, powers, tap_bytes
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.errors import ArtifactError, DeviceError
from mlsdc.runtime.levels.eagle import EagleState
from mlsdc.runtime.levels.grown import GROWN_WORDS, HEAD, MOST
from mlsdc.runtime.levels.ngram_ahead import AheadNgramLevel
from mlsdc.runtime.program import ArenaArg, Tap
from mlsdc.runtime.sampling_params import SamplingParams
from mlsdc.runtime.step import Header
from tests.function_level import sends_all
from tests.gpu.fake_ahead import FakeAhead
from tests.gpu.fake_cuda import FakeCuda, Launched

WAITS = ("cuStreamSynchronize", "cuEventSynchronize", "cuMemcpyDtoH_v2", "cuMemcpyHtoD_v2")
TOKEN, CHAIN = 65, 4
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


class Answers:
    """What the kernels that the host listens to would say: the target TOKEN, heads TOKEN before its neighbours, a tree that grows CHAIN of
    them."""

    def __init__(self, artifact: Artifact, fake: FakeCuda) -> None:
        self.fake = fake
        self.ahead = FakeAhead(artifact, fake)
        (target,) = artifact.manifest.targets
        self.names = {key: [entry.split(": ")[0] for entry in info.abi] for key, info in target.kernels.items()}
        self.widths: dict[str, int] = {}  # of a row of `top_k_join`
        for level in artifact.manifest.levels:
            for program in artifact.programs(level.name, target).values() if level.programs else ():
                widths = {tap.arena: tap.shape[1] for tap in program.taps.values() if len(tap.shape) == 2}
                for launch in program.launches:
                    if widths and launch.kernel.startswith("top_k_join"):  # `trees` repeats those of `draft`
                        end = launch.args[self.names[launch.kernel].index("y_ptr")]
                        assert isinstance(end, ArenaArg)
                        self.widths[launch.kernel] = widths[end.arena]

    def __call__(self, launched: Launched) -> None:
        names = self.names[launched.entry]
        if launched.entry in self.widths:
            width = self.widths[launched.entry]
            k = width // 2
            row = np.concatenate([-np.arange(k) * 0.5, TOKEN // 4 + np.arange(k), [4.0]]).astype(np.float32)
            self.at(launched, names.index("y_ptr"), launched.grid * width * 4).view(np.float32)[:] = np.tile(row, launched.grid)
        elif self.ahead.run(launched):
            return
        elif launched.entry.startswith("argmax_join"):
            self.at(launched, names.index("y_ptr"), launched.grid * 4).view(np.int32)[:] = TOKEN
        elif launched.entry.startswith("grow"):
            grown = self.at(launched, names.index("grown"), launched.grid * GROWN_WORDS * 4).view(np.int32).reshape(-1, GROWN_WORDS)
            grown[:, 0] = CHAIN
            for i in range(CHAIN):
                grown[:, HEAD + i], grown[:, HEAD + MOST + i] = TOKEN, i - 1

    def at(self, launched: Launched, argument: int, num_bytes: int) -> np.ndarray:
        block: np.ndarray = self.fake.block(int.from_bytes(launched.values[argument], "little"), num_bytes)[:num_bytes]
        return block


class Counted:
    """The engine on the fake driver, and of each step the waits, the graphs launched, and the graphs of commits among them."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fake = FakeCuda()
        self.fake.execute = Answers(Artifact.open(path), self.fake)
        monkeypatch.setattr(cuda_driver, "load_library", lambda: self.fake)
        self.engine = sends_all(Engine.load(path, device="cuda", num_pages=60))
        self.steps: list[tuple[int, int, int]] = []
        self.lists: list[Counter[str]] = []  # of each step how often each level's launch lists were started: `eagle.fuse`
        self.drafted = self.commits = 0
        commit, step = self.engine._commit.run, self.engine.step

        def committed() -> None:
            self.commits += 1
            commit()

        for level in self.engine.drafting.levels[1:]:
            for name, program in level.memory.programs.items():  # type: ignore[attr-defined]
                program.start = self.counted(f"{level.name}.{name}", program.start)
        counts, follow = self.engine.drafting.levels[0], self.engine._follow
        assert isinstance(counts, AheadNgramLevel)
        assert follow is not None
        follow.start = self.counted("follow", follow.start)  # type: ignore[method-assign]
        counts._list.start = self.counted("counts.ahead", counts._list.start)  # type: ignore[method-assign]

        def counted() -> bool:
            start, self.commits = len(self.fake.calls), 0
            self.lists.append(Counter())
            done = step()
            calls = self.fake.calls[start:]
            self.steps.append((sum(calls.count(name) for name in WAITS), calls.count("cuGraphLaunch"), self.commits))
            return done

        self.engine._commit.run = committed  # type: ignore[method-assign]
        self.engine.step = counted  # type: ignore[method-assign]

    def counted(self, name: str, start: Callable[..., None]) -> Callable[..., None]:
        def counting(*args: int) -> None:
            self.lists[-1][name] += 1
            start(*args)

        return counting

    def only(self, *names: str) -> Counted:
        dropped = [level.name for level in self.engine.drafting.levels if level.name not in names]
        self.engine.drafting._compose(dropped)
        return sends_all(self.engine) and self

    def program(self, name: str) -> CudaProgram:
        program = self.engine._memory.programs[name]
        assert isinstance(program, CudaProgram)
        return program


@pytest.fixture
def counted(levels_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    counted = Counted(levels_folder / "levels.mlsdc", monkeypatch)
    yield counted
    counted.engine.close()


def test_a_step_that_counts_draft_for_waits_once(counted: Counted) -> None:
    (result,) = counted.only("counts").engine.generate([[TOKEN] * 8], PARAMS)
    assert result.statistics.accepted > 2
    assert {waits for waits, _, _ in counted.steps} == {1}
    assert any(commits for _, _, commits in counted.steps)


OWN_TIME = {"medusa": ["medusa.draft"], "eagle": ["eagle.fuse", "eagle.trees"]}  # lists of a draft that is not made ahead


@pytest.mark.parametrize("names", [("medusa",), ("eagle",), ("counts", "medusa", "eagle")])
def test_a_step_waits_once_whatever_drafts_and_the_first_draft_of_all_levels_costs_one_wait_more(
        counted: Counted, names: tuple[str, ...]) -> None:
    """Drafts are made behind the step that brings what they start from, all rounds of them: an eagle's, its features, and a medusa's."""
    (result,) = counted.only(*names).engine.generate([[TOKEN] * 8], PARAMS)
    assert result.statistics.accepted > 4
    own = [name for level in names for name in OWN_TIME.get(level, [])]
    first = next(i for i, lists in enumerate(counted.lists) if lists[own[0]])
    for i, ((waits, graphs, commits), lists) in enumerate(zip(counted.steps, counted.lists, strict=True)):
        assert waits == (2 if i == first else 1)
        assert graphs == 1 + commits + lists.total()
        assert [name for name in own if lists[name]] == (own if i == first else [])
    ahead = [f"{name}.ahead" for name in names]
    assert sum(all(lists[name] for name in ahead) for lists in counted.lists) >= 2


def test_what_was_drafted_ahead_for_other_tokens_is_not_used(counted: Counted) -> None:
    """The host came to something else, or has forgotten some of it: the level drafts in its own time, from what was committed."""
    request = counted.only("eagle").engine.submit([TOKEN] * 8, SamplingParams(max_tokens=40, ignore_eos=True))
    for step in range(6):
        counted.engine.step()
        state = request.drafter
        if step == 2:
            assert isinstance(state, EagleState)
            assert state.made is not None
            state.made = (state.made[0], TOKEN + 1, state.made[2])
        elif step == 4:
            assert isinstance(state, EagleState)
            state.release()
    assert [lists["eagle.trees"] for lists in counted.lists] == [0, 1, 0, 1, 0, 1]
    assert [waits for waits, _, _ in counted.steps] == [1, 2, 1, 2, 1, 2]
    counted.engine.wait(request)
    assert request.output == [TOKEN] * 40


def test_gpu_check_tells_trees_that_are_the_host_s_from_others(levels_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake makes a medusa's guesses, from which both make the same; what its `grow` writes is no tree of the eagle's guesses."""
    fake = FakeCuda()
    fake.execute = Answers(Artifact.open(levels_folder / "levels.mlsdc"), fake)
    monkeypatch.setattr(cuda_driver, "load_library", lambda: fake)
    medusa, eagle = check_drafts(levels_folder / "levels.mlsdc", "cuda")
    assert (medusa.level, eagle.level) == ("medusa", "eagle")
    assert medusa.passed
    assert medusa.trees > 8
    assert not eagle.passed
    assert eagle.texts
    assert eagle.same == 0 < eagle.trees


def test_what_one_list_feeds_another_arrives_without_a_wait_and_once(counted: Counted) -> None:
    (level,) = [level for level in counted.engine.drafting.levels if level.name == "eagle"]
    memory = level.memory  # type: ignore[attr-defined]
    fuse, draft, features = memory.programs["fuse"], memory.programs["trees"], memory.buffers.features
    made = np.random.default_rng(0).standard_normal((2, features.shape[1]), np.float32)
    counted.fake.execute = None
    counted.fake.block(memory.arena + fuse.spec.taps["features"].arena, made.nbytes)[: made.nbytes] = made.reshape(-1).view(np.uint8)
    counted.lists.append(Counter())
    memory.buffers.header[Header.ROWS] = memory.buffers.header[Header.OUT] = 2
    waited, found = counted.fake.calls.count("cuStreamSynchronize"), []
    features[:2] = 9
    assert fuse.feed(draft, "features")
    draft.start()
    assert counted.fake.calls.count("cuStreamSynchronize") == waited
    for _ in range(2):
        found.append(memory.device.download(memory.inputs + memory.places["features"], made.nbytes).view(np.float32).reshape(made.shape))
        draft.start()
    assert np.array_equal(found[0], made)
    assert (found[1] == 9).all()


def test_lists_that_grow_no_trees_have_no_later_rounds(counted: Counted) -> None:
    """What the last trees left in the header is not theirs: an eagle's features of one row are fused as one row."""
    (memory,) = [level.memory for level in counted.engine.drafting.levels if level.name == "eagle"]  # type: ignore[attr-defined]
    header = memory.buffers.header
    header[Header.ROWS], header[Header.OUT], header[Header.LATER] = 1, 1, 8
    assert memory.programs["fuse"]._bucket()[0] == 1
    assert memory.programs["draft"]._bucket()[0] == 1
    assert memory.programs["trees"]._bucket()[0] == 8


def test_nothing_is_captured_loaded_or_allocated_after_load(counted: Counted) -> None:
    before = len(counted.fake.calls)
    counted.engine.generate([[TOKEN] * 8], PARAMS)
    assert set(counted.fake.calls[before:]) == {"cuStreamSynchronize", "cuCtxSetCurrent", "cuGraphLaunch"}


def test_commits_of_a_grouped_cache_have_graphs_with_and_without_pages_to_fill(counted: Counted) -> None:
    limits = counted.engine.manifest.limits
    most = len(counted.engine._memory.buffers.group_page)
    program = counted.program("commit")
    assert set(program._graphs) == {(size, groups) for size in powers(limits.max_num_batched_tokens) for groups in (0, most)}
    header, filled = counted.engine._memory.buffers.header, []
    for groups in (0, 1):
        header[Header.COMMITS], header[Header.GROUPS] = 3, groups
        start = len(counted.fake.launched)
        program.run()
        counted.engine.device.synchronise()  # type: ignore[attr-defined]
        filled.append(sum(launched.entry.startswith("quantise_kv") for launched in counted.fake.launched[start:]))
    assert filled[0] == 0
    assert filled[1] > 0


def test_every_level_s_programs_are_graphs(counted: Counted) -> None:
    for level in counted.engine.drafting.levels[1:]:
        for program in level.memory.programs.values():  # type: ignore[attr-defined]
            assert isinstance(program, CudaProgram)
            assert len(program._graphs) >= 6, program.name


def test_what_is_copied_of_a_tap_is_what_a_bucket_fills(counted: Counted) -> None:
    limits = counted.engine.manifest.limits
    tap = Tap(0, "f4", (limits.max_num_batched_tokens, 10))
    assert tap_bytes(tap, {"ROWS": 4, "OUT": 2}, limits) == 4 * 4 * 10
    assert tap_bytes(tap, {}, limits) == tap.num_bytes


# what is refused


def refused(levels_folder: Path, monkeypatch: pytest.MonkeyPatch, fake: FakeCuda) -> str:
    monkeypatch.setattr(cuda_driver, "load_library", lambda: fake)
    with pytest.raises((DeviceError, ArtifactError)) as caught:
        Engine.load(levels_folder / "levels.mlsdc", device="cuda", num_pages=60)
    assert not fake.memory
    return str(caught.value)


def test_too_little_memory_for_all_levels_is_said_with_the_plan_before_anything_is_allocated(
        levels_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would have been enough for the target alone."""
    first, *table = refused(levels_folder, monkeypatch, FakeCuda(free=750_000)).splitlines()
    assert first.startswith("cuda:0 (Fake GPU): ")
    assert first.endswith("750,000 of 1,073,741,824 are free: lower memory.kv_pool or limits, or free the GPU")
    assert {line.rpartition(" ")[0].strip() for line in table if "weights" in line} == {"medusa weights", "eagle weights", "target weights"}
    assert any(line.startswith("kv pool") for line in table)


def test_a_driver_that_is_too_old_is_named(levels_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "speaks CUDA 11.8, target h100 needs CUDA 12.0" in refused(levels_folder, monkeypatch, FakeCuda(version=11080))


def test_another_architecture_is_named(levels_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "built for h100 (sm_90), cuda:0 (Fake GPU) is sm_80: compile for it" in refused(levels_folder, monkeypatch, FakeCuda(sm=80))


def test_a_kernel_that_is_missing_is_named(levels_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launch is in the program, the target has none of that name."""
    real = Artifact.open

    def without(path: Path) -> Artifact:
        artifact = real(path)
        (target,) = artifact.manifest.targets
        del target.kernels[next(key for key in target.kernels if key.startswith("settle_kv"))]  # type: ignore[attr-defined]
        return artifact

    monkeypatch.setattr(Artifact, "open", staticmethod(without))
    fake = FakeCuda()
    monkeypatch.setattr(cuda_driver, "load_library", lambda: fake)
    with pytest.raises(ArtifactError, match="target h100: no kernel 'settle_kv_.*'; compile again"):
        Engine.load(levels_folder / "levels.mlsdc", device="cuda", num_pages=60)
    assert not fake.memory
