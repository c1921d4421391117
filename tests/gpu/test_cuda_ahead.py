"""Counts on the device, behind a step's choices, on the fake driver: what is proposed, when nothing is, and what a step costs the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.controller import Drafter
from mlsdc.runtime.device import cuda_driver
from mlsdc.runtime.device.cuda import CudaLevel
from mlsdc.runtime.device.cuda_list import CudaKernelList
from mlsdc.runtime.device.kernel_list import list_bytes
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.levels import ngram_ahead
from mlsdc.runtime.levels.base import LevelState
from mlsdc.runtime.levels.ngram import NgramLevel
from mlsdc.runtime.levels.ngram_ahead import AheadNgramLevel, AheadNgramState
from mlsdc.runtime.memory_plan import load_plan
from mlsdc.runtime.sampling_params import SamplingParams, Speculation
from mlsdc.runtime.tree import EMPTY, Tree
from tests.function_level import SendAll, sends_all
from tests.gpu.fake_ahead import Speaker, choice, proposed
from tests.gpu.fake_cuda import FakeCuda

WAITS = ("cuStreamSynchronize", "cuEventSynchronize", "cuMemcpyDtoH_v2", "cuMemcpyHtoD_v2")
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.9, seed=1 << 63 | 5)
PROMPTS = [[3, 4, 5, 6] * 4, [10], [7, 7, 7, 8] * 3, list(range(20, 50))]


class Rig:
    """An engine whose target is a `Speaker`. Every proposal is compared with the host's."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, num_pages: int = 60) -> None:
        self.fake = FakeCuda()
        self.fake.execute = speaker = Speaker(Artifact.open(path), self.fake)
        self.ahead = speaker.ahead
        monkeypatch.setattr(cuda_driver, "load_library", lambda: self.fake)
        self.engine = sends_all(Engine.load(path, device="cuda", num_pages=num_pages))
        (level,), memory = self.engine.drafting.levels, self.engine._memory
        assert isinstance(level, AheadNgramLevel)
        assert isinstance(memory, CudaLevel)
        speaker.level = memory
        self.level, self.own = level, level.propose_all
        self.plain = NgramLevel(self.engine.manifest.levels[0], level.index)
        level.propose_all = self.propose_all  # type: ignore[method-assign]
        self.proposed: Counter[tuple[bool, bool]] = Counter()  # by whether there was a tree, and whether the host's state has one
        self.steps: list[Counter[str]] = []  # of each, driver calls and kernels behind the target's
        self.commits = 0
        step, commit = self.engine.step, self.engine._commit.run

        def counted() -> bool:
            calls, launched = len(self.fake.calls), len(self.fake.launched)
            done = step()
            found = Counter(self.fake.calls[calls:])
            found["waits"] = sum(found[name] for name in WAITS)
            found.update(one.entry.partition("_order")[0] for one in self.fake.launched[launched:])
            found["commits"], self.commits = self.commits, 0
            self.steps.append(found)
            return done

        def committed() -> None:
            self.commits += 1
            commit()

        self.engine.step = counted  # type: ignore[method-assign]
        self.engine._commit.run = committed  # type: ignore[method-assign]

    def propose_all(self, states: Sequence[LevelState], budgets: Sequence[int]) -> list[Tree]:
        trees = self.own(states, budgets)
        for state, budget, tree in zip(states, budgets, trees, strict=True):
            assert isinstance(state, AheadNgramState)
            expected = self.expected(state, budget)
            if tree or not state.begun:
                assert (tree.tokens, tree.parents) == (expected.tokens, expected.parents)
                np.testing.assert_allclose(tree.logq, expected.logq, rtol=1e-5, atol=1e-6)
            self.proposed[bool(tree), bool(expected)] += 1
        return trees

    def expected(self, state: AheadNgramState, budget: int) -> Tree:
        host = self.plain.start()
        host.observe(state.history[state.forgotten :])
        if state.drawn is not None:
            host.couple(state.drawn)
        found: Tree = proposed(host, min(budget, self.plain.max_nodes), state.forgotten)
        return found


@pytest.fixture
def rig(tiny_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    rig = Rig(tiny_gpu, monkeypatch)
    yield rig
    rig.engine.check_integrity()
    rig.engine.close()


def choices_of(text: Sequence[int], count: int) -> list[int]:
    """What the target of a `Rig` says after a prompt."""
    tokens = list(text)
    for _ in range(count):
        tokens.append(choice(tokens[-1], len(tokens) - 1))
    return tokens[len(text) :]


def test_every_step_of_every_request_drafts_what_the_host_would_and_waits_once(rig: Rig) -> None:
    """More requests than sequences, greedy and drawn ones, several choices of one prompt; texts are the target's."""
    prompts = PROMPTS * 3
    params = [GREEDY, DRAWN, SamplingParams(max_tokens=25, ignore_eos=True, n=2)] * 4
    results = rig.engine.generate(prompts, params)
    for prompt, one, result in zip(prompts, params, results, strict=True):
        assert result.token_ids == choices_of(prompt, one.max_tokens or 0)
        assert all(other.token_ids == result.token_ids for other in result.others)
    assert rig.proposed[True, True] > 100
    assert not rig.proposed[False, True]  # it was always there
    assert {step["waits"] for step in rig.steps} == {1}
    assert sum(result.statistics.accepted for result in results) > 50


def test_the_memory_plan_has_the_blocks(rig: Rig, tiny_gpu: Path) -> None:
    artifact = Artifact.open(tiny_gpu)
    plan = load_plan(artifact, artifact.pick_target("cuda"))
    assert isinstance(rig.level._list, CudaKernelList)
    taken = list_bytes(rig.level._list.blocks)
    assert taken <= plan.levels[0].tables <= taken + 1024


def test_three_kernels_and_two_graphs_are_behind_the_target(rig: Rig) -> None:
    rig.engine.generate([PROMPTS[0]], GREEDY)
    first, *steps = rig.steps
    assert [first[name] for name in ("follow", "ngram_clear", "ngram_observe", "ngram_propose")] == [1, 1, 1, 1]
    for step in steps[:-1]:
        assert [step[name] for name in ("follow", "ngram_clear", "ngram_observe", "ngram_propose")] == [1, 0, 1, 1]
        assert step["cuGraphLaunch"] == 3 + step["commits"]


@pytest.mark.parametrize("params", [SamplingParams(max_tokens=9, ignore_eos=True, speculation=Speculation(enabled=False)),
                                    SamplingParams(max_tokens=1, ignore_eos=True)])
def test_a_step_that_nobody_drafts_after_starts_the_target_alone(rig: Rig, params: SamplingParams) -> None:
    rig.engine.generate(PROMPTS[:2], params)
    for step in rig.steps:
        assert step["follow"] == 0
        assert step["cuGraphLaunch"] == 1
        assert step["waits"] == 1


def test_preempted_requests_go_on_drafting_what_the_host_would(tiny_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tiny_gpu, monkeypatch, num_pages=14)
    results = rig.engine.generate(PROMPTS, SamplingParams(max_tokens=60, ignore_eos=True))
    assert sum(result.statistics.preemptions for result in results) > 0
    assert [result.token_ids for result in results] == [choices_of(prompt, 60) for prompt in PROMPTS]
    assert rig.proposed[True, True] > 20
    assert {step["waits"] for step in rig.steps} == {1}
    rig.engine.close()


def test_a_block_that_holds_something_else_is_filled_again_and_never_drafted_from(rig: Rig) -> None:
    """One token more was counted, some were taken back, or the block is another's: nobody drafts in the next step, and then all do."""
    request = rig.engine.submit(PROMPTS[0], GREEDY)
    for step in range(14):
        rig.engine.step()
        if step in (4, 7, 10):
            state = request.drafter
            assert isinstance(state, AheadNgramState)
            held = rig.ahead.blocks[state.block]
            if step == 4:
                held.observe([1])
            elif step == 7:
                state.rollback(2)
                request.num_observed -= 2
            else:
                state.block = -1
    rig.engine.wait(request)
    assert request.output == choices_of(PROMPTS[0], 40)
    assert {step["waits"] for step in rig.steps} == {1}
    assert sum(step["ngram_clear"] for step in rig.steps) >= 3
    assert rig.proposed[True, True] > 5


def test_what_a_paused_request_missed_is_fed_and_its_next_draft_comes_a_step_later(rig: Rig) -> None:
    class Pausing(SendAll):
        steps = 0

        def wish(self, drafter: Drafter, budget: int) -> int:
            self.steps += 1
            return 0 if 3 <= self.steps < 8 else budget

    rig.engine.drafting.controller = Pausing()
    rig.engine.generate([PROMPTS[0]], GREEDY)
    follows = [step["follow"] for step in rig.steps]
    assert follows[3:10] == [1, 0, 0, 0, 0, 0, 1]
    assert {step["waits"] for step in rig.steps} == {1}
    assert not rig.proposed[False, True]  # a request whose proposal is not there is not asked


def test_a_text_longer_than_a_block_begins_anew_with_its_latest_tokens(tiny_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_ahead, "MOST_BYTES", 1)
    monkeypatch.setattr(ngram_ahead, "LEAST_TOKENS", 160)
    rig = Rig(tiny_gpu, monkeypatch)
    prompts, params = [PROMPTS[0] * 3, PROMPTS[3] * 2], [SamplingParams(max_tokens=50, ignore_eos=True),
                                                          SamplingParams(max_tokens=50, ignore_eos=True, temperature=0.5, seed=3)]
    results = rig.engine.generate(prompts, params)
    assert [result.token_ids for result in results] == [choices_of(prompt, 50) for prompt in prompts]
    assert rig.proposed[True, True] > 10
    assert sum(step["ngram_clear"] for step in rig.steps) > 2
    rig.engine.close()


def test_a_state_that_no_step_works_ahead_for_proposes_by_itself(rig: Rig) -> None:
    state, other = rig.level.start(), rig.level.start()
    assert state.propose(4) == EMPTY
    for tokens in ([1, 2, 1, 2, 1], [2], [1, 2]):
        state.observe(tokens)
        other.observe([*tokens, 9])
        first, second = rig.propose_all([state, other], [4, 9])
        assert len(first) == 4
        assert second
    state.rollback(3)
    assert rig.propose_all([state], [9])[0]
    state.rollback(100)
    assert state.propose(9) == EMPTY


def test_more_states_than_blocks_take_turns(rig: Rig) -> None:
    states = [rig.level.start() for _ in range(11)]
    for i, state in enumerate(states):
        state.observe([i, i + 1] * 5)
    trees = rig.propose_all(states, [5] * 11)
    assert [tree.tokens[0] for tree in trees] == list(range(11))
    assert all(rig.propose_all([state], [5])[0] == tree for state, tree in zip(states, trees, strict=True))
