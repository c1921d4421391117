"""What is not served is refused by name, in OpenAI's shape, and nothing else notices."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from rig import HI, serving, text_after

from mlsdc.runtime.server import ServerSettings

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": "a", "suffix": "b"}, "suffix", "suffix: this server has no such field"),
    ({"prompt": "a", "speculation": {"depth": 1}}, "speculation.depth", "speculation.depth: this server has no such field"),
    ({"prompt": 1}, "prompt", "prompt: 1, expected"),
    ({"prompt": ["a", 3]}, "prompt[1]", "prompt[1]: 3, expected"),
    ({"prompt": []}, "prompt", "prompt: [], expected"),
    ({"prompt": ""}, "prompt", "prompt: empty, expected at least one token"),
    ({"prompt": [70000]}, "prompt[0]", "prompt[0]: 70000, expected a token id"),
    ({"prompt": "a", "n": "1"}, "n", "n: '1', expected a valid integer"),
    ({"prompt": "a", "n": 99}, "n", "n: 99, at most 16"),
    ({"prompt": "a", "stop": [""]}, "stop[0]", "stop[0]: ''"),
    ({"prompt": "a", "stop": ["x" * 300]}, "stop[0]", "stop[0]: 300 characters, at most 256"),
    ({"prompt": "a", "stop": ["x"] * 17}, "stop", "stop: 17 strings, at most 16"),
    ({"prompt": "a", "temperature": -1}, "temperature", "temperature: -1"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias.x", "logit_bias"),
    ({"prompt": "a", "logit_bias": {"90000": 1}}, "logit_bias[90000]", "logit_bias[90000]"),
    ({"prompt": "a", "max_tokens": 4000}, "max_tokens", "max_tokens: 4000 after a prompt of 1"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens", "max_tokens: 0, expected at least 1"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", "stream_options: expected only where stream"),
    ({"prompt": "a", "speculation": {"levels": ["x"]}}, "speculation.levels", "speculation.levels: 'x' is not a drafting level"),
    ({"prompt": "a", "deadline_s": 1e9}, "deadline_s", "deadline_s: 1e+09, at most 3600"),
    ({"prompt": ["a"] * 65}, "prompt", "prompt: 65 prompts, at most 64"),
    ({}, "prompt", "prompt: missing"),
]


@pytest.mark.parametrize(("body", "param", "message"), REFUSED)
def test_a_wrong_completion_is_a_400_that_names_the_field(body: dict[str, Any], param: str, message: str) -> None:
    async def main() -> None:
        async with serving() as rig:
            answer = await rig.http.post("/v1/completions", json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
            assert error["message"].startswith(message)
            assert error["param"] == param

    asyncio.run(main())


@pytest.mark.parametrize(("fields", "param"), [
    ({"functions": []}, "functions"), ({"audio": {}}, "audio"), ({"top_logprobs": 3}, "top_logprobs"), ({"messages": []}, "messages"),
    ({"messages": [{"role": "bard", "content": "x"}]}, "messages[0].role"), ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content[0]"),
    ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs.messages"),
    ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
])
def test_a_wrong_chat_is_a_400_that_names_the_field(fields: dict[str, Any], param: str) -> None:
    async def main() -> None:
        async with serving() as rig:
            answer = await rig.http.post("/v1/chat/completions", json={"messages": HI, **fields})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"].startswith(param)

    asyncio.run(main())


@pytest.mark.parametrize("body", [
    b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"prompt":"\\ud800"}', b'{"prompt":"a","temperature":NaN}', b"1" * 99999])
def test_bodies_that_are_no_request_are_a_400(body: bytes) -> None:
    async def main() -> None:
        async with serving() as rig:
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
                answer = await rig.http.post(path, content=body)
                assert answer.status_code == 400
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    asyncio.run(main())


def test_unknown_paths_and_methods_have_the_same_shape() -> None:
    async def main() -> None:
        async with serving() as rig:
            for method, path, status in (("GET", "/nope", 404), ("GET", "/v1/completions", 405), ("DELETE", "/health", 405)):
                answer = await rig.http.request(method, path)
                assert answer.status_code == status
                assert answer.json()["error"]["message"].startswith(path)

    asyncio.run(main())


def test_a_large_body_is_a_413_and_a_long_prompt_is_refused_before_it_is_tokenized() -> None:
    async def main() -> None:
        async with serving(settings=ServerSettings(max_body_bytes=20_000)) as rig:
            assert (await rig.http.post("/v1/completions", json={"prompt": "a" * 30_000})).status_code == 413

            async def chunks() -> Any:
                for _ in range(30):
                    yield b"x" * 1000

            assert (await rig.http.post("/v1/completions", content=chunks())).status_code == 413
            answer = await rig.http.post("/v1/completions", json={"prompt": "a" * 19_000})
            assert answer.status_code == 400
            assert answer.json()["error"]["message"].startswith("prompt: 19000 characters")

    asyncio.run(main())


def test_a_key_opens_the_api_and_nothing_else_needs_one() -> None:
    async def main() -> None:
        async with serving(settings=ServerSettings(api_keys=("right", "other"))) as rig:
            for header in ({}, {"authorization": "Bearer wrong"}, {"authorization": "right"}, {"authorization": "Bearer "}):
                answer = await rig.http.get("/v1/models", headers=header)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
            for key in ("right", "other"):
                assert (await rig.http.get("/v1/models", headers={"authorization": f"Bearer {key}"})).status_code == 200
            for path in ("/health", "/ready", "/metrics", "/version"):
                assert (await rig.http.get(path)).status_code == 200
            assert (await rig.http.post("/tokenize", json={"prompt": "a"})).status_code == 401

    asyncio.run(main())


def test_request_ids_come_back() -> None:
    async def main() -> None:
        async with serving() as rig:
            assert (await rig.http.get("/health", headers={"x-request-id": "abc-1"})).headers["x-request-id"] == "abc-1"
            made = (await rig.http.get("/health", headers={"x-request-id": "a b\x7f"})).headers["x-request-id"]
            assert len(made) == 32

    asyncio.run(main())


def test_a_refused_request_leaves_its_neighbours_alone() -> None:
    async def main() -> None:
        async with serving() as rig:
            good = [rig.http.post("/v1/completions", json={"prompt": f"p{i}", "max_tokens": 30, "temperature": 0}) for i in range(6)]
            bad = [rig.http.post("/v1/completions", json=body) for body, _, _ in REFUSED]
            answers = await asyncio.gather(*good, *bad)
            assert [a.json()["choices"][0]["text"] for a in answers[:6]] == [text_after(f"p{i}", 30) for i in range(6)]
            assert {a.status_code for a in answers[6:]} == {400}
            assert json.loads(answers[-1].text)["error"]

    asyncio.run(main())
