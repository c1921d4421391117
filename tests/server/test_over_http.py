"""The app behind uvicorn, on a socket: load with clients that leave, a fuzz of bodies, the benchmark's own client."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from proposers import random_trees
from rig import Rig, chat_text, serving, text_after

from mlsdc.runtime.bench.client import Answer, stream_chat
from mlsdc.runtime.bench.serve import Load, percentile, run_round
from mlsdc.runtime.errors import MlsdcError
from mlsdc.runtime.levels.base import Level
from mlsdc.runtime.server import ServerSettings

uvicorn = pytest.importorskip("uvicorn")
REQUESTS = int(os.environ.get("MLSDC_REQUESTS", "150"))  # the figures of docs/serve.md are of 10,000 each
MALFORMED = int(os.environ.get("MLSDC_MALFORMED", "1500"))


@asynccontextmanager
async def listening(level: Level | None = None, settings: ServerSettings | None = None, **options: Any) -> AsyncIterator[tuple[Rig, str]]:
    async with serving(level, settings, **options) as rig:
        # a machine that stands still for seconds must not make the server close a connection that is asked on
        server = uvicorn.Server(uvicorn.Config(rig.app, port=0, lifespan="off", log_level="error", timeout_keep_alive=3600))
        task = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(0.005)
        yield rig, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        server.should_exit = True
        await task


def test_mixed_requests_some_of_them_left_are_each_as_if_alone() -> None:
    """Shared beginnings, short and long, whole and streamed, 30 % left in the middle, a small pool, speculation on."""
    async def main() -> None:
        rng = random.Random(0)
        async with listening(random_trees(1), num_pages=120, max_num_seqs=6, settings=ServerSettings(max_queue=200)) as (rig, url):
            async with httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=16)) as client:
                beginnings = ["abcabc" * 4, "xyz", "hello there " * 3]

                places = asyncio.Semaphore(16)  # else most would leave while they wait for a connection of the client's own

                async def one(number: int) -> None:
                    async with places:
                        prompt, count = f"{beginnings[number % 3]}{number % 11}", 5 + number * 7 % 60
                        body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "stream": number % 2 == 0}
                        if number % 10 < 3:
                            try:
                                await client.post("/v1/completions", json=body, timeout=rng.uniform(0.001, 0.05))
                            except httpx.TimeoutException:
                                return
                            return
                        answer = await client.post("/v1/completions", json=body)
                        if body["stream"]:
                            events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
                            assert events[-1] == "[DONE]"
                            assert len(events) == count + 1
                            text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
                        else:
                            text = answer.json()["choices"][0]["text"]
                        assert text == text_after(prompt, count)

                await asyncio.gather(*(one(number) for number in range(REQUESTS)))

            def idle() -> None:
                inner = rig.engine.engine
                with inner._news:
                    assert inner._news.wait_for(lambda: not inner._stepping and not inner.has_work, 60)
                assert inner.pool.num_available == inner.pool.num_pages

            await asyncio.to_thread(idle)

    asyncio.run(main())


def broken_body(rng: random.Random) -> bytes:
    """A valid body, damaged: bytes changed, cut, repeated, or values of the wrong kind and size."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "max_tokens": 2, "temperature": 0.5, "stop": ["a"], "n": 1,
        "logit_bias": {"5": 1.0}, "stream": False, "seed": 1, "speculation": {"enabled": True}, "response_format": {"type": "text"}}
    values: list[Any] = [
        None, True, -1, 1e308, 10**40, "", "x" * 5000, [], {}, [[]], {"a": {"b": [1]}}, "\u0000", "\U0001f600" * 9, [None], -0.0, "NaN",
        [1, "a"]]
    for name in rng.sample(sorted(body), rng.randint(1, 4)):
        if rng.random() < 0.3:
            del body[name]
        else:
            body[rng.choice([name, name + "s", "\u00e9"])] = rng.choice(values)
    data = bytearray(json.dumps(body).encode())
    kind = rng.random()
    if kind < 0.2:
        del data[rng.randrange(len(data)) :]
    elif kind < 0.5:
        for _ in range(rng.randint(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif kind < 0.55:
        data = bytearray(b"[" * rng.choice([10, 50_000]))
    elif kind < 0.6:
        data = bytearray(rng.randbytes(rng.randrange(200)))
    return bytes(data)


def test_malformed_bodies_are_4xx_or_served_and_the_engine_does_not_notice() -> None:
    async def main() -> None:
        async with serving() as rig:
            rng = random.Random(7)
            statuses: dict[int, int] = {}
            for number in range(MALFORMED):
                path = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")[number % 4]
                answer = await rig.http.post(path, content=broken_body(rng))
                statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
                assert answer.status_code in (200, 400)
                if answer.status_code == 400:
                    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
                    assert "\n" not in answer.json()["error"]["message"]
            assert statuses[400] > MALFORMED * 2 // 3
            answer = await rig.http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 9, "temperature": 0})
            assert answer.json()["choices"][0]["text"] == text_after("ab", 9)

    asyncio.run(main())


def test_the_benchmarks_client_counts_tokens_as_the_server_does() -> None:
    async def main() -> None:
        async with listening() as (rig, url):
            load = Load(3, 7, 12, prompts=("one", "two and more"))
            found = await run_round(url, load)
            assert [answer.tokens for answer in found.answers] == [12] * 7
            assert [sum(count for _, count in answer.arrivals) for answer in found.answers] == [12] * 7
            assert sorted(answer.text for answer in found.answers) == sorted(chat_text(load.prompts[i % 2], 12) for i in range(7))
            assert len(found.values("itl")) == 7 * 11
            assert len(found.values("ttft")) == len(found.values("e2e")) == 7
            figures = found.speculation()
            assert figures is not None
            assert figures["steps"] == sum(answer.usage["speculation"]["steps"] for answer in found.answers if answer.usage)
            with pytest.raises(MlsdcError, match="HTTP 404"):
                await stream_chat(url, load.body("x", "other"))

    asyncio.run(main())


def test_tokens_that_come_at_once_share_the_time() -> None:
    answer = Answer(0.0, [(1.0, 2), (1.3, 3), (1.4, 1)], usage={"completion_tokens": 6})
    assert answer.gaps_s() == pytest.approx([0.0, 0.1, 0.1, 0.1, 0.1])
    assert answer.per_token_s == pytest.approx(0.08)
    assert (answer.first_s, answer.total_s) == (1.0, 1.4)
    assert percentile([1.0, 2.0, 3.0], 0.5) == 2.0
    assert percentile([], 0.5) == 0.0
