"""An app over the fake device, and clients of it that need no socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
from byte_tokenizer import byte_tokenizer
from fake_device import continuation, make_engine
from proposers import LEVELS

from mlsdc.runtime.async_engine import AsyncEngine
from mlsdc.runtime.levels.base import Level
from mlsdc.runtime.server import ServerSettings, create_app
from mlsdc.runtime.server.state import Server

TOKENIZER = byte_tokenizer()
VOCAB = TOKENIZER.tokenizer.get_vocab_size()
HI = [{"role": "user", "content": "hi"}]


class Rig:
    def __init__(self, app: Any, engine: AsyncEngine) -> None:
        self.app = app
        self.engine = engine
        self.server: Server = app.state.server
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
        self.openai = openai.AsyncOpenAI(
            base_url="http://test/v1", api_key="none", max_retries=0, http_client=httpx.AsyncClient(transport=httpx.ASGITransport(app)))

    async def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        lines = (await self.http.get("/metrics")).text.splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"mlsdc:{name}{{", f"mlsdc:{name} "))]
        assert values, name
        return sum(values)


@asynccontextmanager
async def serving(level: Level | None = None, settings: ServerSettings | None = None, **options: Any) -> AsyncIterator[Rig]:
    """Closes the engine afterwards and checks that every page is back."""
    options = {"max_model_len": 400, "num_pages": 400, "tokenizer": TOKENIZER, **options}
    inner = make_engine(level or LEVELS["ngram_tree"](), vocab=VOCAB, **options)
    engine = AsyncEngine(inner)
    app = create_app(engine, settings)
    rig = Rig(app, engine)
    async with app.router.lifespan_context(app):
        yield rig
        inner.check_integrity()


def chat_text(content: str, count: int) -> str:
    return TOKENIZER.decode(continuation(TOKENIZER.chat([{"role": "user", "content": content}]), count, VOCAB))


def text_after(prompt: str, count: int) -> str:
    return TOKENIZER.decode(continuation(TOKENIZER.encode(prompt), count, VOCAB))
