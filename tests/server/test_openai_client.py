"""The official OpenAI client is served as it expects: whole and streamed, every field."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from fake_device import continuation
from rig import HI, TOKENIZER, VOCAB, chat_text, serving, text_after

from mlsdc.runtime.server.responses import ChatResponse, CompletionResponse


def test_a_chat_is_answered_with_the_targets_text() -> None:
    async def main() -> None:
        async with serving() as rig:
            answer = await rig.openai.chat.completions.create(model="fake", messages=HI, max_tokens=20, temperature=0)
            (choice,) = answer.choices
            assert (choice.message.content, choice.finish_reason) == (chat_text("hi", 20), "length")
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 20
            assert answer.usage.prompt_tokens == len(TOKENIZER.chat(HI))

    asyncio.run(main())


def test_a_streamed_chat_joins_to_the_whole_one_with_one_event_a_token() -> None:
    async def main() -> None:
        async with serving() as rig:
            stream = await rig.openai.chat.completions.create(
                model="fake", messages=HI, max_tokens=60, temperature=0, stream=True, stream_options={"include_usage": True})
            chunks = [chunk async for chunk in stream]
            assert chunks[0].choices[0].delta.role == "assistant"
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == chat_text("hi", 60)
            assert len(chunks) == 1 + 60 + 1
            assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * 60 + ["length"]
            assert chunks[-1].choices == []
            assert chunks[-1].usage is not None
            assert chunks[-1].usage.completion_tokens == 60

    asyncio.run(main())


@pytest.mark.parametrize("n", [1, 3])
def test_prompts_of_every_kind_are_continued(n: int) -> None:
    async def main() -> None:
        async with serving() as rig:
            kinds: list[Any] = ["ab", ["ab", "cde"], [97, 98], [[97, 98], [99, 100, 101]]]
            for prompt in kinds:
                answer = await rig.openai.completions.create(model="fake", prompt=prompt, max_tokens=7, temperature=0, n=n)
                texts = ["ab"] if prompt in kinds[::2] else ["ab", "cde"]
                if not isinstance(prompt, str) and not isinstance(prompt[0], str):
                    texts = [TOKENIZER.decode(ids) for ids in (prompt if isinstance(prompt[0], list) else [prompt])]
                expected = [text_after(text, 7) for text in texts for _ in range(n)]
                assert [choice.text for choice in answer.choices] == expected
                assert [choice.index for choice in answer.choices] == list(range(len(expected)))

    asyncio.run(main())


def test_streamed_prompts_join_to_the_whole_ones() -> None:
    async def main() -> None:
        async with serving() as rig:
            prompts = ["one", "two and more", "three"]
            stream = await rig.openai.completions.create(model="fake", prompt=prompts, max_tokens=25, temperature=0, n=2, stream=True)
            texts = [""] * 6
            async for chunk in stream:
                texts[chunk.choices[0].index] += chunk.choices[0].text
            assert texts == [text_after(prompt, 25) for prompt in prompts for _ in range(2)]

    asyncio.run(main())


def test_echo_and_log_probabilities_cover_every_token_whole_and_streamed() -> None:
    async def main() -> None:
        async with serving() as rig:
            options: dict[str, Any] = {"model": "fake", "prompt": "Grüße", "max_tokens": 9, "temperature": 0, "echo": True, "logprobs": 2}
            whole = (await rig.openai.completions.create(**options)).choices[0]
            prompt = TOKENIZER.encode("Grüße")
            assert whole.logprobs is not None
            assert whole.text == TOKENIZER.decode(prompt + continuation(prompt, 9, VOCAB))
            assert whole.logprobs.token_logprobs is not None
            assert len(whole.logprobs.tokens or []) == len(prompt) + 9
            assert whole.logprobs.token_logprobs[0] is None
            assert all(value < 0 for value in whole.logprobs.token_logprobs[1:] if value is not None)
            assert all(len(top or {}) in (2, 3) for top in (whole.logprobs.top_logprobs or [])[1:])

            parts: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
            text = ""
            async for chunk in await rig.openai.completions.create(**options, stream=True):
                text += chunk.choices[0].text
                for name, values in parts.items():
                    values += getattr(chunk.choices[0].logprobs, name)
            assert text == whole.text
            assert parts == {name: getattr(whole.logprobs, name) for name in parts}

            scored = (await rig.openai.completions.create(**{**options, "max_tokens": 0})).choices[0]
            assert scored.text == "Grüße"
            assert scored.logprobs is not None
            assert scored.logprobs.token_logprobs == whole.logprobs.token_logprobs[: len(prompt)]

    asyncio.run(main())


def test_chat_log_probabilities_name_token_and_bytes() -> None:
    async def main() -> None:
        async with serving() as rig:
            answer = await rig.openai.chat.completions.create(
                model="fake", messages=HI, max_tokens=12, temperature=0, logprobs=True, top_logprobs=3)
            logprobs = answer.choices[0].logprobs
            assert logprobs is not None
            content = logprobs.content
            assert content is not None
            tokens = continuation(TOKENIZER.chat(HI), 12, VOCAB)
            assert [bytes(entry.bytes or []) for entry in content] == [TOKENIZER.vocabulary.bytes_of(token) for token in tokens]
            assert all(entry.top_logprobs[0].logprob == entry.logprob and len(entry.top_logprobs) == 3 for entry in content)

    asyncio.run(main())


def test_stop_strings_seeds_and_biases_reach_the_engine() -> None:
    async def main() -> None:
        async with serving() as rig:
            text = text_after("ab", 40)
            cut = text[6:9]
            answer = await rig.openai.completions.create(model="fake", prompt="ab", max_tokens=40, temperature=0, stop=[cut])
            assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text[: text.index(cut)], "stop")
            assert answer.choices[0].model_extra == {"stop_reason": cut}

            seeded = [await rig.openai.completions.create(model="fake", prompt="ab", max_tokens=20, seed=7) for _ in range(2)]
            other = await rig.openai.completions.create(model="fake", prompt="ab", max_tokens=20, seed=8)
            assert seeded[0].choices[0].text == seeded[1].choices[0].text != other.choices[0].text

            bias = {str(TOKENIZER.encode("z")[0]): 100}
            biased = await rig.openai.completions.create(
                model="fake", prompt="ab", max_tokens=5, temperature=0, logit_bias=bias, extra_body={"min_p": 0.1, "top_k": 5})
            assert biased.choices[0].text == "zzzzz"

    asyncio.run(main())


def test_usage_carries_what_speculation_did_and_speculation_is_the_requests_choice() -> None:
    async def main() -> None:
        async with serving() as rig:
            texts, drafted = [], []
            for speculation in (None, {"enabled": False}, {"max_draft_tokens": 2, "levels": ["ngram"]}):
                answer = await rig.openai.completions.create(
                    model="fake", prompt="abc" * 9, max_tokens=80, temperature=0,
                    extra_body={"speculation": speculation} if speculation else {})
                texts.append(answer.choices[0].text)
                assert answer.usage is not None
                assert answer.usage.model_extra is not None
                figures = answer.usage.model_extra["speculation"]
                drafted.append(figures["drafted"])
                assert figures["accepted"] == sum(level["accepted"] for level in figures["levels"].values())
                for level in figures["levels"].values():
                    assert sum(place["accepted"] for place in level["per_position"]) == level["accepted"]
            assert texts[0] == texts[1] == texts[2] == text_after("abc" * 9, 80)
            assert drafted[0] > drafted[2] > drafted[1] == 0

    asyncio.run(main())


def test_answers_have_the_documented_shape() -> None:
    async def main() -> None:
        async with serving() as rig:
            chat = await rig.http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 5, "logprobs": True, "n": 2, "seed": 1})
            ChatResponse.model_validate(chat.json())
            text = await rig.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 5, "logprobs": 1, "echo": True})
            CompletionResponse.model_validate(text.json())

    asyncio.run(main())


def test_models_and_tokens() -> None:
    async def main() -> None:
        async with serving() as rig:
            assert [model.id async for model in rig.openai.models.list()] == ["fake"]
            assert (await rig.openai.models.retrieve("fake")).id == "fake"
            with pytest.raises(openai.NotFoundError, match="'gpt' is not served here"):
                await rig.openai.models.retrieve("gpt")
            with pytest.raises(openai.NotFoundError):
                await rig.openai.chat.completions.create(model="gpt", messages=HI)
            tokens = (await rig.http.post("/tokenize", json={"prompt": "한국 hi"})).json()
            assert tokens["tokens"] == TOKENIZER.encode("한국 hi")
            assert (await rig.http.post("/detokenize", json={"tokens": tokens["tokens"]})).json() == {"prompt": "한국 hi"}
            assert (await rig.http.post("/tokenize", json={"messages": HI})).json()["tokens"] == TOKENIZER.chat(HI)
            document = (await rig.http.get("/openapi.json")).json()
            assert json.dumps(document)
            assert set(document["paths"]) >= {"/v1/chat/completions", "/v1/completions", "/tokenize", "/metrics"}

    asyncio.run(main())
