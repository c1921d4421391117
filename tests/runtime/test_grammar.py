"""Grammars and speculation together: the text is valid, and the same whatever is drafted, batched or preempted (law L1, A10)."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from byte_tokenizer import byte_tokenizer
from fake_device import make_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from proposers import FunctionLevel

from mlsdc.runtime.errors import RequestError
from mlsdc.runtime.grammar import GrammarCompiler, Matcher
from mlsdc.runtime.levels.base import Level
from mlsdc.runtime.levels.ngram import NgramLevel
from mlsdc.runtime.manifest import LevelInfo
from mlsdc.runtime.request import Result
from mlsdc.runtime.sampling_params import Grammar, SamplingParams, Speculation
from mlsdc.runtime.step import Array, Header
from mlsdc.runtime.tree import Tree, chain

pytest.importorskip("llguidance")

TOKENIZER = byte_tokenizer(merges=True)
VOCAB = TOKENIZER.tokenizer.get_vocab_size()
EOS = TOKENIZER.tokenizer.token_to_id("<|im_end|>")
SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["number", "colour", "flags", "name"],
    "properties": {
        "number": {"type": "integer", "minimum": 0, "maximum": 999}, "colour": {"enum": ["red", "green", "the other"]},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}, "name": {"type": "string", "maxLength": 6},
    },
}
JSON = Grammar("json_schema", json.dumps(SCHEMA))
OBJECT = Grammar("json_object")
PROMPTS = ["a", "the the the", '{"number": 12, "colour": "red", "flags": [true, false, true], "name": "x"}']
PARAMS = {
    "greedy": SamplingParams(grammar=JSON, max_tokens=200),
    "hot": SamplingParams(grammar=JSON, temperature=1.3, seed=5, max_tokens=200),
    "filtered": SamplingParams(
        grammar=JSON, temperature=1.0, top_k=20, top_p=0.9, repetition_penalty=1.1, seed=9, max_tokens=200, logprobs=2),
}


def known(replies: list[str]) -> Level:
    """Drafts what is in `replies`, as if it knew them: after the last 3 tokens that occur there."""
    texts = [TOKENIZER.encode(reply) for reply in replies]

    def propose(history: list[int], budget: int) -> Tree:
        for text in texts:
            for at in range(3, len(text)):
                if text[at - 3 : at] == history[-3:]:
                    return chain(text[at : at + budget])
        return chain([])

    return FunctionLevel(propose)


def junk(history: list[int], budget: int) -> Tree:
    """Wide trees of anything, end tokens and their children among it."""
    tokens = [EOS, ord("x"), EOS, *((history[-1] * 7 + i * 13) % VOCAB for i in range(budget))][:budget]
    return Tree(tuple(tokens), tuple((i - 1) // 2 for i in range(len(tokens))), (0.0,) * len(tokens), (0,) * len(tokens))


def serve(level: Level | None, params: SamplingParams, **options: Any) -> list[Result]:
    options = {"vocab": VOCAB, "tokenizer": TOKENIZER, "eos": (EOS,), "max_model_len": 400, "num_pages": 500, **options}
    with make_engine(level, **options) as engine:
        results = engine.generate(PROMPTS, params)
        engine.check_integrity()
    return results


@pytest.fixture(scope="module")
def plain() -> dict[str, list[Result]]:
    return {name: serve(None, params) for name, params in PARAMS.items()}


@pytest.mark.parametrize("name", PARAMS)
def test_the_text_is_what_the_schema_says_and_ends_there(plain: dict[str, list[Result]], name: str) -> None:
    for result in plain[name]:
        found = json.loads(result.text)
        assert list(found) == ["number", "colour", "flags", "name"]
        assert 0 <= found["number"] <= 999
        assert found["colour"] in ("red", "green", "the other")
        assert len(found["flags"]) <= 3
        assert len(found["name"]) <= 6
        assert result.finish_reason == "stop"


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("drafter", ["ngram", "junk", "known"])
def test_drafts_of_any_kind_leave_the_text(plain: dict[str, list[Result]], name: str, drafter: str) -> None:
    levels: dict[str, Any] = {
        "ngram": lambda: NgramLevel(LevelInfo("ngram", "ngram", {"order": 3, "width": 3})), "junk": lambda: FunctionLevel(junk),
        "known": lambda: known([result.text for result in plain[name]])}
    for seqs in (1, 4):
        results = serve(levels[drafter](), PARAMS[name], max_num_seqs=seqs)
        assert [result.token_ids for result in results] == [result.token_ids for result in plain[name]]
        assert [result.logprobs for result in results] == [result.logprobs for result in plain[name]]


def test_known_drafts_are_accepted(plain: dict[str, list[Result]]) -> None:
    results = serve(known([result.text for result in plain["greedy"]]), PARAMS["greedy"], max_num_seqs=1)
    assert sum(result.statistics.accepted for result in results) > sum(result.statistics.steps for result in results)


def test_forced_tokens_are_drafted_as_the_grammars_own() -> None:
    results = serve(FunctionLevel(lambda history, budget: chain([])), PARAMS["greedy"], max_num_seqs=1)
    for result in results:
        level = result.statistics.levels["grammar"]
        assert level.accepted > 20
        assert level.accepted >= 0.8 * level.drafted
    off = SamplingParams(**{**vars(PARAMS["greedy"]), "speculation": Speculation(enabled=False)})
    assert [r.token_ids for r in serve(FunctionLevel(junk), off)] == [r.token_ids for r in results]


def test_costs_are_learned_of_the_rows_that_ran_not_of_those_that_were_proposed() -> None:
    told: list[int] = []
    ran: list[int] = []
    with make_engine(FunctionLevel(junk), vocab=VOCAB, tokenizer=TOKENIZER, eos=(EOS,), max_model_len=400, num_pages=500) as engine:
        buffers, run = engine._memory.buffers, engine._forward.run

        def forward() -> None:
            ran.append(int(buffers.header[Header.ROWS]))
            run()

        def step(rows: int, context: int, seconds: float, nodes: int = 0) -> None:
            told.append(rows)
            assert rows == ran[-1]

        engine._forward.run = forward  # type: ignore[method-assign]
        engine.drafting.controller.step = step  # type: ignore[method-assign]
        engine.generate(PROMPTS, PARAMS["greedy"])
    assert len(set(told)) > 2


@settings(max_examples=5)
@given(st.integers(0, 1 << 30), st.integers(50, 120), st.integers(4, 40), st.integers(1, 4))
def test_small_pools_batches_and_chunks_leave_the_text(seed: int, pages: int, rows: int, seqs: int) -> None:
    params = SamplingParams(grammar=JSON, temperature=1.0, seed=seed, max_tokens=60)
    first = serve(None, params)
    again = serve(FunctionLevel(junk), params, num_pages=pages, max_num_batched_tokens=rows, max_logit_rows=rows, max_num_seqs=seqs)
    assert [result.token_ids for result in again] == [result.token_ids for result in first]


def test_choices_have_matchers_of_their_own() -> None:
    params = SamplingParams(grammar=JSON, temperature=1.5, seed=3, max_tokens=200, n=4)
    for result in serve(FunctionLevel(junk), params):
        texts = [result.text, *(other.text for other in result.others)]
        assert all(list(json.loads(text)) == list(SCHEMA["properties"]) for text in texts)  # type: ignore[call-overload]
        assert len(set(texts)) > 1


@pytest.mark.parametrize("pattern", [r"[0-9]{3}-[0-9]{4}", r"(yes|no)", r"한국+!"])
def test_a_regex_is_matched_whole(pattern: str) -> None:
    params = SamplingParams(grammar=Grammar("regex", pattern), temperature=2.0, seed=1, max_tokens=300)
    for result in serve(FunctionLevel(junk), params, max_model_len=600, num_pages=900):
        if result.finish_reason == "stop":
            assert re.fullmatch(pattern, result.text)


def test_length_cuts_a_text_and_stop_strings_still_work() -> None:
    (whole, *_) = serve(None, PARAMS["greedy"])
    cut = SamplingParams(grammar=JSON, max_tokens=5)
    assert [r.finish_reason for r in serve(FunctionLevel(junk), cut)] == ["length"] * 3
    stopped = SamplingParams(grammar=JSON, max_tokens=200, stop=('"colour"',))
    assert serve(FunctionLevel(junk), stopped)[0].text == whole.text[: whole.text.index('"colour"')]


@pytest.mark.parametrize(("grammar", "message"), [
    (Grammar("json_schema", "{"), "grammar: not a JSON schema"), (Grammar("json_schema", "[]"), "grammar: "),
    (Grammar("json_schema", '{"type": "objekt"}'), "grammar: Invalid type: objekt"), (Grammar("regex", "("), "grammar: "),
    (Grammar("lark", "start: nothing"), "grammar: "), (Grammar("json_schema", '{"not": {}}'), "grammar: Unimplemented keys"),
])
def test_a_wrong_grammar_is_refused(grammar: Grammar, message: str) -> None:
    with pytest.raises(RequestError, match=f"^{re.escape(message)}") as caught:
        serve(None, SamplingParams(grammar=grammar))
    assert "\n" not in str(caught.value)


def test_fields_that_contradict_a_grammar_are_refused() -> None:
    with pytest.raises(RequestError, match="min_tokens: 3, expected 0 with a grammar"):
        SamplingParams(grammar=JSON, min_tokens=3)
    with pytest.raises(RequestError, match=r"grammar.kind: 'xml'"):
        Grammar("xml")
    with pytest.raises(RequestError, match="no end token"):
        serve(None, SamplingParams(grammar=JSON), eos=())


@settings(max_examples=25)
@given(st.integers(0, 1 << 30))
def test_every_nodes_mask_is_that_of_a_fresh_matcher_after_its_path(seed: int) -> None:
    """Trees in any order of nodes, with wrong tokens in them; the matcher is left where it was."""
    rng = random.Random(seed)
    compiler = GrammarCompiler(TOKENIZER, VOCAB, (EOS,))
    matcher = compiler.matcher(OBJECT)
    history: list[int] = []

    def mask_after(path: list[int]) -> Array:
        fresh, mask = compiler.matcher(OBJECT), np.zeros((1, -(-VOCAB // 32)), np.uint32)
        fresh.accept(path)
        fresh.fill(Tree(), mask)
        return mask[0]

    for _ in range(12):
        allowed = [token for token in range(VOCAB) if mask_after(history)[token // 32] >> (token % 32) & 1]
        count = rng.randint(1, 10)
        tokens = [rng.choice(allowed) if rng.random() < 0.7 else rng.randrange(VOCAB) for _ in range(count)]
        tree = Tree(tuple(tokens), tuple(rng.randint(-1, i - 1) for i in range(count)))
        pruned = matcher.prune(tree)
        assert sum(parent < 0 for parent in pruned.parents) == sum(
            parent < 0 and token in allowed for token, parent in zip(tree.tokens, tree.parents, strict=True))
        masks = np.zeros((1 + len(pruned), -(-VOCAB // 32)), np.uint32)
        matcher.fill(pruned, masks)
        for node in range(-1, len(pruned)):
            path: list[int] = []
            at = node
            while at >= 0:
                path.insert(0, pruned.tokens[at])
                at = pruned.parents[at]
            if EOS not in path:
                assert (masks[1 + node] == mask_after([*history, *path])).all()
        token = rng.choice(allowed)
        matcher.accept([token])
        history.append(token)
        if matcher.ended:
            return
        assert matcher.error is None


class Refusing(Matcher):
    """Fails at the third token."""

    count = 0

    def accept(self, tokens: Sequence[int]) -> int:
        self.count += len(tokens)
        self.error = "too complex" if self.count >= 3 else None
        return len(tokens)


def test_a_matcher_that_fails_ends_its_own_request_only() -> None:
    with make_engine(None, vocab=VOCAB, tokenizer=TOKENIZER, eos=(EOS,), max_model_len=400, num_pages=500) as engine:
        broken, good = (engine.submit("a", PARAMS["greedy"]) for _ in range(2))
        broken.grammar = Refusing(GrammarCompiler(TOKENIZER, VOCAB, (EOS,)).matcher(JSON)._matcher, frozenset())
        assert json.loads(engine.wait(good).text)
        with pytest.raises(RequestError, match="grammar: cannot be matched any further: too complex"):
            engine.wait(broken)
        engine.check_integrity()
