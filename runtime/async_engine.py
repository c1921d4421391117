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
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary, ref

from mlsdc.runtime.admission import Prompt
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.request import Delta, Request, Result
from mlsdc.runtime.sampling_params import SamplingParams


class AsyncEngine:
    """Owns an `Engine` and the thread that steps it. Close it, or use it in `async with`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._stopping = False
        self._wakers: WeakKeyDictionary[asyncio.AbstractEventLoop, _Waker] = WeakKeyDictionary()
        self._due: deque[_Waker] = deque()
        engine.wake_readers_by(self._wake)
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
        loop = asyncio.get_running_loop()
        waker = self._wakers.get(loop)
        if waker is None:
            waker = self._wakers[loop] = _Waker(loop, self._due)
        news = _News(self.engine, waker)
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

    def _wake(self) -> None:
        while self._due:
            try:
                waker = self._due.popleft()
            except IndexError:  # another thread took it
                return
            waker.wake()

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


class _Waker:
    """Sets events of one event loop from other threads: one call into the loop, and one write to its pipe, for all of a step's."""

    def __init__(self, loop: asyncio.AbstractEventLoop, due: deque[_Waker]) -> None:
        """`due` are the wakers that `wake` is to be called of."""
        self._loop = ref(loop)  # the loop is the key this is kept under
        self._events: deque[asyncio.Event] = deque()
        self._due = due
        self._is_due = False

    def add(self, event: asyncio.Event) -> None:
        """`event` is to be set at the next `wake`. Under the engine's lock. Raises RuntimeError if the loop is closed."""
        loop = self._loop()
        if loop is None or loop.is_closed():
            raise RuntimeError("the event loop is closed")
        self._events.append(event)
        if not self._is_due:
            self._is_due = True
            self._due.append(self)

    def wake(self) -> None:
        self._is_due = False  # first: what is added from now on is due again
        loop = self._loop()
        if loop is not None:
            with suppress(RuntimeError):  # closed since: the next `add` says so
                loop.call_soon_threadsafe(self._set)

    def _set(self) -> None:
        while self._events:
            self._events.popleft().set()


class _News(deque[Request]):
    """A request's listener that wakes a coroutine: the engine's thread appends, the event loop's thread takes."""

    def __init__(self, engine: Engine, waker: _Waker) -> None:
        super().__init__()
        self._engine = engine
        self._waker = waker
        self._some = asyncio.Event()

    def append(self, request: Request) -> None:
        super().append(request)
        try:
            self._waker.add(self._some)
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
