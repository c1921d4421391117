"""The runtime inside a plain Python server: FastAPI, one artifact, answers whole or streamed.

    pip install fastapi uvicorn
    python examples/embed_fastapi.py build/smollm2.mlsdc
    curl localhost:8000/generate -H 'content-type: application/json' -d '{"prompt": "Name three colours.", "max_tokens": 40}'

One AsyncEngine serves all requests together; a client that hangs up in the middle of a stream frees its pages.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from mlsdc.runtime import AsyncEngine, RequestError, SamplingParams, Speculation


class Generate(BaseModel):
    """`max_tokens` null means the rest of the context; `speculate` changes the speed, never the text."""

    prompt: str
    max_tokens: int | None = 128
    stop: list[str] = []
    speculate: bool = True
    stream: bool = False

    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, stop=tuple(self.stop), speculation=Speculation(enabled=self.speculate))


def create_app(engine: AsyncEngine) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with engine:
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/generate")
    async def generate(body: Generate) -> Any:
        chat = [{"role": "user", "content": body.prompt}]
        try:
            if body.stream:
                deltas = engine.stream(chat, body.params())
                first = await anext(deltas)  # a refused request is an error here, before the stream has begun
                return StreamingResponse(events(first, deltas), media_type="text/event-stream")
            result = await engine.generate(chat, body.params())
        except RequestError as error:
            raise HTTPException(400, str(error)) from None
        return {
            "text": result.text, "finish_reason": result.finish_reason, "tokens": len(result.token_ids),
            "acceptance_length": result.statistics.acceptance_length,
        }

    return app


async def events(first: Any, rest: AsyncIterator[Any]) -> AsyncIterator[str]:
    yield event(first)
    async for delta in rest:
        yield event(delta)


def event(delta: Any) -> str:
    return f"data: {json.dumps({'text': delta.text, 'finish_reason': delta.finish_reason})}\n\n"


if __name__ == "__main__":
    import uvicorn

    uvicorn.run(create_app(AsyncEngine.load(sys.argv[1])))
