"""The engine's surface: requests in, tokens out, errors before anything runs, neighbours never disturbed."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
from byte_tokenizer import byte_tokenizer
from fake_device import VOCAB, continuation, make_engine
from proposers import LEVELS, random_trees

from mlsdc.runtime.engine import Engine
from mlsdc.runtime.errors import ArtifactError, DeviceError, RequestError
from mlsdc.runtime.request import Delta
from mlsdc.runtime.sampling_params import SamplingParams, Speculation

TOKENIZER = byte_tokenizer()
TEXT_VOCAB = TOKENIZER.tokenizer.get_vocab_size()


def text_engine(**options: Any) -> Engine:
    return make_engine(LEVELS["ngram_tree"](), vocab=TEXT_VOCAB, tokenizer=TOKENIZER, **options)


def few(count: int = 10) -> SamplingParams:
    return SamplingParams(max_tokens=count)


# --- prompts ---


def test_a_text_is_one_prompt() -> None:
    (result,) = text_engine().generate("hello", few())
    assert result.prompt_token_ids == TOKENIZER.encode("hello")
    assert result.token_ids == continuation(TOKENIZER.encode("hello"), 10, TEXT_VOCAB)
    assert result.text == TOKENIZER.decode(result.token_ids)


def test_a_list_of_ids_is_one_prompt() -> None:
    (result,) = make_engine().generate([1, 2, 3], few())
    assert result.token_ids == continuation([1, 2, 3], 10)


def test_numpy_ids_are_ids() -> None:
    (result,) = make_engine().generate([list(np.array([1, 2, 3]))], few())
    assert result.token_ids == continuation([1, 2, 3], 10)


def test_a_list_of_messages_is_one_chat() -> None:
    (result,) = text_engine().generate([{"role": "user", "content": "hi"}], few())
    assert result.prompt_token_ids == TOKENIZER.chat([{"role": "user", "content": "hi"}])


def test_prompts_of_all_kinds_mix_and_keep_their_order() -> None:
    results = text_engine().generate(["hello", [1, 2], [{"role": "user", "content": "hi"}]], few())
    assert [r.prompt_token_ids for r in results] == [
        TOKENIZER.encode("hello"), [1, 2], TOKENIZER.chat([{"role": "user", "content": "hi"}])]


def test_the_callers_ids_are_not_changed() -> None:
    prompt = [1, 2, 3]
    make_engine().generate([prompt], few())
    assert prompt == [1, 2, 3]


def test_no_prompts_give_no_results() -> None:
    assert make_engine().generate([], few()) == []


# --- refusals ---


@pytest.mark.parametrize(("prompt", "message"), [
    ([[]], "prompt: empty"), ([[1, VOCAB]], rf"prompt\[1\]: {VOCAB}, expected a token id from 0 to {VOCAB - 1}"), ([[-1]], r"prompt\[0\]"),
    ([[1.5]], r"prompt\[0\]"), ([[True]], r"prompt\[0\]"), ([["a"]], r"prompt\[0\]"), ([[1] * 96], "prompt: 96 tokens, at most 95"),
    (["text"], "no tokenizer"), ([b"x"], "prompt: bytes"), (3, "prompts: int"), ([None], "prompt"), (b"x", "prompts: bytes"),
])
def test_a_bad_prompt_is_refused_and_named(prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make_engine().generate(prompt, few())


@pytest.mark.parametrize(("params", "message"), [
    (SamplingParams(max_tokens=95), "max_tokens: 95 after a prompt of 2, at most 94"), (SamplingParams(min_tokens=95), "min_tokens"),
    (SamplingParams(logit_bias={VOCAB: 1.0}), "logit_bias"), (SamplingParams(stop=("x",)), "stop: this engine has no tokenizer"),
    (SamplingParams(stop_token_ids=(VOCAB,)), r"stop_token_ids\[0\]"), ({"max_tokens": 3}, "expected a SamplingParams"),
    (SamplingParams(speculation=Speculation(max_draft_tokens=17)), "max_draft_tokens: 17, this artifact verifies at most 16"),
    (SamplingParams(speculation=Speculation(levels=("eagle",))), "'eagle' is not a drafting level of this artifact; it has none"),
])
def test_parameters_the_engine_cannot_serve_are_refused(params: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make_engine().generate([[1, 2]], [params])


def test_an_empty_text_is_refused() -> None:
    with pytest.raises(RequestError, match="prompt: empty"):
        text_engine().generate("", few())


def test_what_can_never_fit_the_pool_is_refused_at_once() -> None:
    engine = make_engine(LEVELS["oracle"](), num_pages=10, page_size=4)
    with pytest.raises(RequestError, match="need 12 KV pages, the pool has 10"):
        engine.generate([[1, 2]], few(26))
    assert make_engine(num_pages=7, page_size=4).generate([[1, 2]], few(26))[0].token_ids == continuation([1, 2], 26)


def test_one_bad_prompt_of_many_runs_none() -> None:
    engine = make_engine()
    with pytest.raises(RequestError):
        engine.generate([[1, 2], [99]], few())
    assert not engine.step()


def test_a_refused_request_leaves_its_neighbours_alone() -> None:
    engine = make_engine(random_trees(0))
    request = engine.submit([1, 2, 3], few(30))
    engine.step()
    with pytest.raises(RequestError):
        engine.generate([[VOCAB]], few())
    assert engine.wait(request).token_ids == continuation([1, 2, 3], 30)


def test_params_must_match_the_prompts_in_number() -> None:
    with pytest.raises(RequestError, match="sampling params: 1 for 2 prompts"):
        make_engine().generate([[1], [2]], [few()])


def test_levels_that_the_artifact_does_not_know_are_refused() -> None:
    engine = make_engine()
    with pytest.raises(ArtifactError, match="does not know all of them"):
        Engine(engine.manifest, engine.device, engine._memory, [LEVELS["oracle"](), LEVELS["wrong"]()])


# --- streams ---


def test_a_stream_brings_the_same_ids_and_text() -> None:
    deltas = list(text_engine().stream("the cat", few(30)))
    ids = continuation(TOKENIZER.encode("the cat"), 30, TEXT_VOCAB)
    assert [t for d in deltas for t in d.token_ids] == ids
    assert "".join(d.text for d in deltas) == TOKENIZER.decode(ids)
    assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + ["length"]


def test_on_token_brings_every_prompts_tokens() -> None:
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    ends: list[int] = []

    def on_token(i: int, delta: Delta) -> None:
        seen[i] += delta.token_ids
        if delta.finish_reason:
            ends.append(i)

    results = make_engine(random_trees(0)).generate([[1], [2, 3], [4]], few(20), on_token=on_token)
    assert [seen[i] for i in range(3)] == [r.token_ids for r in results]
    assert sorted(ends) == [0, 1, 2]


def test_the_finish_reason_comes_once() -> None:
    engine = make_engine()
    request = engine.submit([1], few(3))
    while engine.step():
        pass
    request.publish()
    assert [request.take(), request.take()] == [Delta("", continuation([1], 3), "length"), Delta("", [], None)]


def test_leaving_a_stream_early_frees_its_pages() -> None:
    engine = make_engine(random_trees(0))
    for _ in engine.stream([1, 2, 3], few(50)):
        break
    assert engine.pool.num_available == engine.pool.num_pages
    engine.check_integrity()


def test_a_callback_that_raises_ends_its_own_call_only() -> None:
    engine = make_engine(random_trees(0))
    neighbour = engine.submit([5, 6], few(40))

    def on_token(i: int, delta: Delta) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        engine.generate([[1, 2, 3]], few(40), on_token=on_token)
    assert engine.wait(neighbour).token_ids == continuation([5, 6], 40)
    assert engine.pool.num_available == engine.pool.num_pages


def test_streams_interleave() -> None:
    engine = make_engine(random_trees(0))
    one, two = engine.stream([1], few(20)), engine.stream([2], few(20))
    ids: tuple[list[int], list[int]] = ([], [])
    for a in one:
        ids[0].extend(a.token_ids)
        ids[1].extend(next(two, Delta("", [], None)).token_ids)
    ids[1].extend(t for d in two for t in d.token_ids)
    assert ids == (continuation([1], 20), continuation([2], 20))


# --- abort ---


def test_an_aborted_request_keeps_its_tokens_and_frees_its_pages() -> None:
    engine = make_engine()
    request = engine.submit([1, 2, 3], few(40))
    for _ in range(5):
        engine.step()
    engine.abort(request)
    result = engine.wait(request)
    assert (result.finish_reason, result.token_ids) == ("abort", continuation([1, 2, 3], 5))
    assert engine.pool.num_available == engine.pool.num_pages


def test_a_waiting_request_can_be_aborted() -> None:
    engine = make_engine(max_num_seqs=1)
    first, second = engine.submit([1], few(10)), engine.submit([2], few(10))
    engine.step()
    engine.abort(second)
    assert engine.wait(second).finish_reason == "abort"
    assert engine.wait(first).token_ids == continuation([1], 10)


def test_aborting_twice_or_too_late_does_nothing() -> None:
    engine = make_engine()
    request = engine.submit([1], few(3))
    result = engine.wait(request)
    engine.abort(request)
    engine.abort(request)
    assert result.finish_reason == "length"


@pytest.mark.parametrize("seed", range(3))
def test_random_aborts_leak_nothing_and_change_no_neighbour(seed: int) -> None:
    rng = random.Random(seed)
    engine = make_engine(random_trees(seed), num_pages=45)
    requests = []
    for _ in range(150):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
        requests.append((engine.submit(prompt, few(rng.randint(1, 30))), prompt))
        for _ in range(rng.randint(0, 3)):
            engine.step()
            engine.check_integrity()
        if rng.random() < 0.3:
            engine.abort(rng.choice(requests)[0])
    while engine.step():
        engine.check_integrity()
    for request, prompt in requests:
        assert request.output == continuation(prompt, len(request.output))
        assert request.finish_reason in ("length", "abort")
    assert engine.pool.num_available == engine.pool.num_pages


# --- prefixes ---


def test_a_repeated_prompt_computes_its_last_page_only() -> None:
    engine = make_engine(LEVELS["ngram_tree"](), page_size=4)
    prompt = [i % VOCAB for i in range(41)]
    (first,) = engine.generate([prompt], few())
    (second,) = engine.generate([prompt], few())
    assert first.token_ids == second.token_ids
    assert (first.statistics.cached_tokens, second.statistics.cached_tokens) == (0, 40)


def test_a_conversation_reuses_its_own_answers() -> None:
    engine = make_engine(LEVELS["oracle"](), page_size=4)
    (first,) = engine.generate([[1, 2, 3, 4, 5]], few(20))
    (second,) = engine.generate([[1, 2, 3, 4, 5, *first.token_ids, 7]], few())
    assert second.statistics.cached_tokens == 24
    assert second.token_ids == continuation([1, 2, 3, 4, 5, *first.token_ids, 7], 10)


# --- scheduling ---


def test_a_long_prompt_does_not_stop_decoding() -> None:
    engine = make_engine(max_num_batched_tokens=8, max_logit_rows=8)
    short = engine.submit([1], few(60))
    engine.step()
    engine.submit([i % VOCAB for i in range(80)], few(5))
    for count in range(2, 20):
        engine.step()
        assert short.num_output == count


def test_drafts_leave_room_for_a_waiting_prompt() -> None:
    engine = make_engine(LEVELS["wrong"](), max_num_batched_tokens=9, max_logit_rows=9, drafts=8)
    engine.submit([1], few(60))
    engine.step()
    late = engine.submit([i % VOCAB for i in range(20)], few(5))
    for _ in range(6):
        engine.step()
    assert late.num_output > 0


def test_prompts_that_end_together_wait_for_logit_rows() -> None:
    engine = make_engine(LEVELS["oracle"](), max_num_seqs=6, max_logit_rows=6)
    prompts = [[i] for i in range(6)]
    first = engine.submit(prompts[0], few(30))
    engine.step()
    results = engine.generate(prompts[1:], few())
    assert [r.token_ids for r in results] == [continuation(p, 10) for p in prompts[1:]]
    assert engine.wait(first).token_ids == continuation(prompts[0], 30)


def test_requests_are_admitted_in_order() -> None:
    engine = make_engine(max_num_seqs=2)
    requests = [engine.submit([i], few(10)) for i in range(6)]
    order: list[int] = []
    while engine.step():
        order += [i for i, r in enumerate(requests) if r.finished and i not in order]
    assert order == sorted(order)


# --- threads ---


def test_many_threads_share_one_engine() -> None:
    engine = make_engine(random_trees(0), num_pages=60)
    wrong: list[object] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(15):
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
            if rng.random() < 0.3:
                for _delta in engine.stream(prompt, few(30)):
                    break
                continue
            (result,) = engine.generate([prompt], few(15))
            if result.token_ids != continuation(prompt, 15):
                wrong.append((prompt, result))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong
    while engine.step():
        pass
    engine.check_integrity()
    assert engine.pool.num_available == engine.pool.num_pages


def test_a_broken_step_reaches_every_waiting_request() -> None:
    engine = make_engine()
    requests = [engine.submit([i], few(10)) for i in range(3)]

    def broken() -> None:
        raise OSError("device gone")

    engine._forward.run = broken  # type: ignore[method-assign]
    with pytest.raises(OSError, match="device gone"):
        engine.wait(requests[0])
    with pytest.raises(DeviceError, match="the engine stopped: OSError: device gone"):
        engine.wait(requests[1])
    with pytest.raises(DeviceError, match="load it again"):
        engine.submit([1], few())


# --- the end ---


def test_close_ends_requests_and_the_device_once() -> None:
    engine = make_engine()
    request = engine.submit([1], few(10))
    engine.close()
    engine.close()
    assert engine.device.closed == 1  # type: ignore[attr-defined]
    with pytest.raises(DeviceError, match="closed"):
        engine.wait(request)
    with pytest.raises(DeviceError, match="closed"):
        engine.generate([[1]], few())


def test_leaving_a_with_block_closes() -> None:
    with make_engine() as engine:
        pass
    assert engine.device.closed == 1  # type: ignore[attr-defined]


def test_timings_are_in_order() -> None:
    (result,) = make_engine().generate([[1]], few())
    t = result.timings
    assert t.admitted is not None
    assert t.first_token is not None
    assert t.finished is not None
    assert t.submitted <= t.admitted <= t.first_token <= t.finished
