"""The one place where tokens become output: every kind of end, at every offset of a block."""

from __future__ import annotations

import pytest
from byte_tokenizer import byte_tokenizer
from fake_device import continuation, logits_of, make_engine
from hypothesis import given
from hypothesis import strategies as st
from proposers import LEVELS

from mlsdc.runtime.commit import commit_tokens
from mlsdc.runtime.request import Request
from mlsdc.runtime.sampling_params import SamplingParams

TOKENIZER = byte_tokenizer()


def request_of(params: SamplingParams, *, stop_ids: frozenset[int] = frozenset(), max_length: int = 1000) -> Request:
    stops = stop_ids | set(params.stop_token_ids)
    return Request([1], params, max_length=max_length, stop_ids=stops, budget=0, detokenizer=TOKENIZER.stream())


def feed(request: Request, tokens: list[int], sizes: list[int]) -> None:
    """Commit `tokens` in blocks of these sizes, then one by one, until the request ends."""
    rest = list(tokens)
    for size in [*sizes, *[1] * len(tokens)]:
        if rest and not request.finished:
            commit_tokens(request, rest[:size])
            del rest[:size]


def outcome(request: Request) -> tuple[object, ...]:
    return request.output, "".join(request.text), request.held, request.finish_reason, request.stop_reason


@pytest.mark.parametrize("offset", range(9))
def test_an_end_token_cuts_its_block_at_every_offset(offset: int) -> None:
    request = request_of(SamplingParams(), stop_ids=frozenset({7}))
    block = [3] * offset + [7] + [4] * (8 - offset)
    assert commit_tokens(request, block) == offset + 1
    assert request.output == block[: offset + 1]
    assert request.finish_reason == "stop"
    assert request.stop_reason == 7


@pytest.mark.parametrize("drafts", [1, 3, 8])
@pytest.mark.parametrize("length", range(1, 12))
def test_an_accepted_end_token_ends_the_text_wherever_it_falls(drafts: int, length: int) -> None:
    for prompt in ([1, 2, 3], [4], [9, 9, 2, 1]):
        text = continuation(prompt, 40)
        end = text[length - 1]
        expected = text[: text.index(end) + 1]
        engine = make_engine(LEVELS["oracle"](), drafts=drafts, eos=(end,))
        (result,) = engine.generate([prompt], SamplingParams(max_tokens=40))
        assert (result.token_ids, result.finish_reason, result.stop_reason) == (expected, "stop", end)
        engine.check_integrity()


@pytest.mark.parametrize("drafts", [0, 1, 3, 8])
@pytest.mark.parametrize("count", range(1, 12))
def test_max_tokens_is_exact_for_every_block(drafts: int, count: int) -> None:
    (result,) = make_engine(LEVELS["oracle"](), drafts=drafts).generate([[1, 2]], SamplingParams(max_tokens=count))
    assert len(result.token_ids) == count
    assert result.finish_reason == "length"


@pytest.mark.parametrize("drafts", [0, 1, 3, 8])
@pytest.mark.parametrize("context", range(21, 32))
def test_the_context_is_used_to_its_last_token_and_no_further(drafts: int, context: int) -> None:
    engine = make_engine(LEVELS["oracle"](), drafts=drafts, max_model_len=context)
    (result,) = engine.generate([[1, 2]])
    assert result.token_ids == continuation([1, 2], context - 2)
    assert result.finish_reason == "length"


def test_ignore_eos_goes_on() -> None:
    end = continuation([1, 2, 3], 3)[2]
    (result,) = make_engine(LEVELS["oracle"](), eos=(end,)).generate([[1, 2, 3]], SamplingParams(max_tokens=20, ignore_eos=True))
    assert result.token_ids == continuation([1, 2, 3], 20)


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("least", [1, 2, 5, 8])
def test_min_tokens_masks_end_tokens_by_position_and_only_until_then(name: str, least: int) -> None:
    ends = (4, 6, 10)
    tokens = [1, 2, 3]
    while True:  # the oracle: the greatest logit, without the end tokens while fewer than `least` are out
        row = logits_of(tokens)[:13]
        if len(tokens) - 3 < least:
            row[list(ends)] = -1
        tokens.append(int(row.argmax()))
        if tokens[-1] in ends or len(tokens) == 33:
            break
    (result,) = make_engine(LEVELS[name](), eos=ends).generate([[1, 2, 3]], SamplingParams(max_tokens=30, min_tokens=least))
    assert result.token_ids == tokens[3:]
    assert len(result.token_ids) > least


@given(st.text("abc", min_size=1, max_size=40), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
       st.lists(st.integers(1, 8), max_size=20), st.booleans(), st.integers(0, 5))
def test_stop_strings_do_not_depend_on_blocks(text: str, stops: list[str], sizes: list[int], include: bool, least: int) -> None:
    params = SamplingParams(stop=tuple(stops), include_stop_str_in_output=include, min_tokens=least)
    tokens = TOKENIZER.encode(text)
    one, many = request_of(params), request_of(params)
    feed(one, tokens, [])
    feed(many, tokens, sizes)
    assert outcome(one) == outcome(many)


@given(st.text("abc", min_size=1, max_size=40), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_text_is_cut_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    request = request_of(SamplingParams(stop=tuple(stops)))
    feed(request, TOKENIZER.encode(text), [])
    ends = [text.find(s) + len(s) for s in stops if s in text]
    if not ends:
        assert not request.finished
        assert "".join(request.text) + request.held == text
        return
    done = text[: min(ends)]  # one byte is one token: the stop string that is complete first ends it
    found = [s for s in stops if done.endswith(s)]
    assert "".join(request.text) in [done[: len(done) - len(s)] for s in found]
    assert request.stop_reason in found


@given(st.text("ab", min_size=1, max_size=30), st.text("ab", min_size=2, max_size=5))
def test_no_part_of_a_stop_string_is_ever_shown(text: str, stop: str) -> None:
    request = request_of(SamplingParams(stop=(stop,)))
    for token in TOKENIZER.encode(text):
        commit_tokens(request, [token])
        shown = "".join(request.text)
        expected = text.split(stop)[0]
        assert expected.startswith(shown)
        if request.finished:
            break


def test_stop_strings_are_not_looked_for_in_the_first_min_tokens() -> None:
    request = request_of(SamplingParams(stop=("b",), min_tokens=3))
    commit_tokens(request, TOKENIZER.encode("abbbb"))
    assert "".join(request.text) == "abb"
    assert request.output == TOKENIZER.encode("abbb")


def test_a_stop_string_across_token_borders_ends_the_request() -> None:
    request = request_of(SamplingParams(stop=("END",)))
    assert commit_tokens(request, TOKENIZER.encode("fooENDbar")) == 6
    assert "".join(request.text) == "foo"
    assert request.stop_reason == "END"


def test_held_text_leaves_when_the_request_ends_otherwise() -> None:
    request = request_of(SamplingParams(stop=("END",)), max_length=6)
    commit_tokens(request, TOKENIZER.encode("fooEN"))
    assert "".join(request.text) == "fooEN"
    assert request.finish_reason == "length"


def test_the_text_of_a_stop_id_is_not_shown_unless_asked_for() -> None:
    for include, expected in ((False, "ab"), (True, "abc")):
        request = request_of(SamplingParams(stop_token_ids=tuple(TOKENIZER.encode("c")), include_stop_str_in_output=include))
        commit_tokens(request, TOKENIZER.encode("abcd"))
        assert "".join(request.text) == expected
        assert request.output == TOKENIZER.encode("abc")


def test_an_unfinished_character_leaves_as_a_replacement_at_the_end() -> None:
    request = request_of(SamplingParams(), max_length=4)
    commit_tokens(request, TOKENIZER.encode("é") + TOKENIZER.encode("é")[:1])
    assert "".join(request.text) == "é\ufffd"
    assert request.finish_reason == "length"
