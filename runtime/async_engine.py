"""The engine under asyncio: one thread runs the steps, any number of coroutines stream from it.

    async with AsyncEngine.load("smollm2.mlsdc") as engine:
        async for delta in engine.stream("Hello", SamplingParams(max_tokens=64)):
            ...

A coroutine that is cancelled, or leaves its loop early, aborts its request: the pages are free after the step that was running. Coroutines
of several event loops, and threads that use the `Engine` itself, may share one AsyncEngine.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from mlsdc.runtime.admission import Prompt
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.request import Delta, Request, Result
from mlsdc.runtime.sampling_params import SamplingParams


class AsyncEngine:
    """Owns an `Engine` and the thread that steps it. Close it, or use it in `async with`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="mlsdc-engine", daemon=True)
        self._thread.start()

    @classmethod
    def load(cls, path: str | Path, **options: Any) -> AsyncEngine:
        """`Engine.load` with the same options. It blocks for the second it takes: load before the event loop serves."""
        return cls(Engine.load(path, **options))

    async def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0) -> AsyncIterator[Delta]:
        """Serve one prompt and yield what each step brings, of all its choices. Raises RequestError, DeviceError."""
        request, news = await self._submit(prompt, params, priority)
        try:
            async for delta in news.deltas(request):
                yield delta
        finally:
            self.engine.abort(request)

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0) -> Result:
        """Serve one prompt to its end. Raises RequestError, DeviceError."""
        request, news = await self._submit(prompt, params, priority)
        try:
            async for _ in news.deltas(request):
                pass
        finally:
            self.engine.abort(request)
        return request.result()

    async def submit(self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0) -> Submission:
        """Queue one prompt: for those who want the request itself beside its deltas. Raises RequestError, DeviceError."""
        request, news = await self._submit(prompt, params, priority)
        return Submission(self.engine, request, news)

    async def generate_all(self, prompts: Sequence[Prompt], params: SamplingParams | None = None, *, priority: int = 0) -> list[Result]:
        """Serve prompts together; if one fails or the caller is cancelled, all are aborted."""
        tasks = [asyncio.ensure_future(self.generate(prompt, params, priority=priority)) for prompt in prompts]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def _submit(self, prompt: Prompt, params: SamplingParams | None, priority: int) -> tuple[Request, _News]:
        """Tokenising may take milliseconds: another thread does it, so that the loop's other streams go on."""
        news = _News(self.engine, asyncio.get_running_loop())
        submitted = asyncio.ensure_future(
            asyncio.to_thread(self.engine.submit, prompt, params, priority=priority, listener=news))
        try:
            return await asyncio.shield(submitted), news
        except asyncio.CancelledError:  # the thread cannot be stopped: what it submits is aborted
            submitted.add_done_callback(self._abort_late)
            raise

    def _abort_late(self, submitted: asyncio.Future[Request]) -> None:
        if not submitted.cancelled() and submitted.exception() is None:
            self.engine.abort(submitted.result())

    def _serve(self) -> None:
        try:
            self.engine.serve(lambda: self._stopping)
        except Exception:
            return  # every request has ended with the error, and `submit` says it to those that come

    def close(self) -> None:
        """Let the running step end, stop the thread, end all requests with DeviceError, free the device. Safe to call twice."""
        self._stopping = True
        self.engine.wake()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self.engine.close()

    async def aclose(self) -> None:
        """`close`, without blocking the event loop."""
        await asyncio.to_thread(self.close)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()


class Submission:
    """A queued request. Whoever leaves it before it has ended must `abort` it."""

    def __init__(self, engine: Engine, request: Request, news: _News) -> None:
        self._engine = engine
        self._news = news
        self.request = request

    def deltas(self) -> AsyncIterator[Delta]:
        """What each step brings, of all its choices. Once. Raises DeviceError."""
        return self._news.deltas(self.request)

    def abort(self) -> None:
        """End it; a request that has ended is left as it is."""
        if not all(choice.finished for choice in self.request.choices):
            self._engine.abort(self.request)


class _News(deque[Request]):
    """A request's listener that wakes a coroutine: the engine's thread appends, the event loop's thread takes."""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._engine = engine
        self._loop = loop
        self._some = asyncio.Event()

    def append(self, request: Request) -> None:
        super().append(request)
        try:
            self._loop.call_soon_threadsafe(self._some.set)
        except RuntimeError:  # the loop is closed: nobody reads any more
            self._engine.abort(request)

    async def deltas(self, request: Request) -> AsyncIterator[Delta]:
        left = len(request.choices)
        while left:
            while not self:
                self._some.clear()
                if not self:  # the engine may have appended before `clear`
                    await self._some.wait()
            choice = self.popleft()
            if choice.error is not None:
                raise choice.error
            delta = choice.take()
            left -= delta.finish_reason is not None
            if delta.token_ids or delta.text or delta.finish_reason:
                yield delta
