"""Server-sent events, and answers that notice when their client hangs up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mlsdc.runtime.server.errors import ClientGone

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def hung_up(receive: Receive) -> None:
    """Returns when the client is gone. Only after the body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_hung_up(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client hangs up. Raises ClientGone then."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(hung_up(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class EventStream(Response):
    """Sends what `events` yields as it comes, and closes `events` when the client hangs up or stops reading for too long."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], *, write_timeout_s: float, close: Callable[[], None]) -> None:
        """`close` is called at the end whether `events` was begun or not: one that was not runs none of its own `finally`."""
        self.status_code = 200
        self.background = None
        self.events = events
        self.write_timeout_s = write_timeout_s
        self.close = close
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(hung_up(receive))
        try:
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.close()
            for each in (sending, gone):
                each.cancel()
            results = await asyncio.gather(sending, gone, return_exceptions=True)
        if isinstance(results[0], Exception) and not isinstance(results[0], (OSError, TimeoutError)):
            raise results[0]

    async def _send(self, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for chunk in self.events:
                async with asyncio.timeout(self.write_timeout_s):
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self.events.aclose()
