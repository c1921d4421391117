"""examples/embed_fastapi.py: whole and streamed answers, refusals as 400, a client that hangs up frees its pages."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import byte_tokenizer
from fake_device import continuation, make_engine
from proposers import LEVELS

from mlsdc.runtime.async_engine import AsyncEngine

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")

TOKENIZER = byte_tokenizer()
VOCAB = TOKENIZER.tokenizer.get_vocab_size()


def make_app(root: Path) -> tuple[Any, AsyncEngine]:
    spec = importlib.util.spec_from_file_location("embed_fastapi", root / "examples" / "embed_fastapi.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    engine = AsyncEngine(make_engine(LEVELS["ngram_tree"](), vocab=VOCAB, tokenizer=TOKENIZER, max_model_len=400, num_pages=400))
    return module.create_app(engine), engine


def expected(prompt: str, count: int) -> str:
    return TOKENIZER.decode(continuation(TOKENIZER.chat([{"role": "user", "content": prompt}]), count, VOCAB))


def test_answers_whole_streamed_and_refused(root: Path) -> None:
    async def main() -> None:
        app, engine = make_app(root)
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
        async with app.router.lifespan_context(app), client:
            bodies = [{"prompt": f"question {i}", "max_tokens": 20 + i, "speculate": i % 2 == 0} for i in range(6)]
            answers = await asyncio.gather(*(client.post("/generate", json=body) for body in bodies))
            assert [a.json()["text"] for a in answers] == [expected(f"question {i}", 20 + i) for i in range(6)]

            streamed = await client.post("/generate", json={"prompt": "hi", "max_tokens": 30, "stream": True})
            events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line]
            assert "".join(event["text"] for event in events) == expected("hi", 30)
            assert [event["finish_reason"] for event in events if event["finish_reason"]] == ["length"]

            for stream in (False, True):
                refused = await client.post("/generate", json={"prompt": "hi", "max_tokens": 4000, "stream": stream})
                assert (refused.status_code, refused.json()["detail"].split(":")[0]) == (400, "max_tokens")
            empty = await client.post("/generate", json={"prompt": "hi", "stop": [""]})
            assert (empty.status_code, empty.json()["detail"]) == (400, "stop[0]: empty string, expected text to stop at")
        assert not engine._thread.is_alive()

    asyncio.run(main())


def test_a_client_that_hangs_up_frees_its_pages(root: Path) -> None:
    async def main() -> None:
        app, engine = make_app(root)
        inner = engine.engine
        got = asyncio.Event()
        body = json.dumps({"prompt": "hi", "max_tokens": None, "stream": True}).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST", "path": "/generate",
            "raw_path": b"/generate", "query_string": b"", "root_path": "", "scheme": "http", "client": ("test", 1), "server": ("test", 80),
            "headers": [(b"content-type", b"application/json")],
        }

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await got.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body" and message.get("body"):
                got.set()

        async with app.router.lifespan_context(app):
            await app(scope, receive, send)

            def idle() -> None:
                with inner._news:
                    assert inner._news.wait_for(lambda: not inner._stepping and not inner.has_work, 60)

            await asyncio.to_thread(idle)
            assert inner.pool.num_available == inner.pool.num_pages
            inner.check_integrity()

    asyncio.run(main())
