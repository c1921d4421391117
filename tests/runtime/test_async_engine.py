"""The engine under asyncio: the same texts, cancellation frees pages at once, shutdown is deterministic."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, cast

import pytest
from fake_device import VOCAB, continuation, make_engine
from proposers import random_trees

from mlsdc.runtime.async_engine import AsyncEngine
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.errors import DeviceError, RequestError
from mlsdc.runtime.request import Delta, Request
from mlsdc.runtime.sampling_params import SamplingParams, Speculation


def few(count: int = 10) -> SamplingParams:
    return SamplingParams(max_tokens=count)


def deltas(engine: AsyncEngine, prompt: list[int], params: SamplingParams) -> AsyncGenerator[Delta, None]:
    return cast("AsyncGenerator[Delta, None]", engine.stream(prompt, params))


class Gate:
    """Lets an engine's forward program run only when the test says so."""

    def __init__(self, engine: Engine) -> None:
        self.entered = threading.Semaphore(0)
        self.allowed = threading.Semaphore(0)
        self.open = False
        self.run: Callable[[], None] = engine._forward.run
        engine._forward.run = self  # type: ignore[method-assign,assignment]

    def __call__(self) -> None:
        if not self.open:
            self.entered.release()
            self.allowed.acquire()
        self.run()

    async def wait(self) -> None:
        await asyncio.to_thread(self.entered.acquire)

    def let(self, *, always: bool = False) -> None:
        self.open = self.open or always
        self.allowed.release()


async def until_idle(engine: Engine) -> None:
    """The serving thread has nothing left to do."""
    def idle() -> None:
        with engine._news:
            assert engine._news.wait_for(lambda: not engine._stepping and not engine.has_work, 60)

    await asyncio.to_thread(idle)


def test_many_coroutines_get_their_own_texts() -> None:
    async def main() -> None:
        async with AsyncEngine(make_engine(random_trees(0), num_pages=60)) as engine:
            prompts = [[i % VOCAB, i // VOCAB, 3] for i in range(60)]
            results = await engine.generate_all(prompts, few(15))
            assert [r.token_ids for r in results] == [continuation(p, 15) for p in prompts]
            await until_idle(engine.engine)
            engine.engine.check_integrity()
            assert engine.engine.pool.num_available == engine.engine.pool.num_pages

    asyncio.run(main())


def test_a_stream_brings_every_token_and_one_end() -> None:
    async def main() -> list[Delta]:
        async with AsyncEngine(make_engine(random_trees(0))) as engine:
            return [delta async for delta in engine.stream([1, 2], few(30))]

    seen = asyncio.run(main())
    assert [t for d in seen for t in d.token_ids] == continuation([1, 2], 30)
    assert [d.finish_reason for d in seen] == [None] * (len(seen) - 1) + ["length"]


def test_choices_of_n_stream_together() -> None:
    async def main() -> None:
        async with AsyncEngine(make_engine()) as engine:
            seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
            async for delta in engine.stream([1, 2], SamplingParams(n=3, max_tokens=9)):
                seen[delta.choice] += delta.token_ids
            assert seen == dict.fromkeys(range(3), continuation([1, 2], 9))

    asyncio.run(main())


def test_a_cancelled_coroutine_frees_its_pages_within_two_steps() -> None:
    async def main() -> None:
        inner = make_engine(random_trees(0))
        gate = Gate(inner)
        engine = AsyncEngine(inner)
        neighbour = asyncio.create_task(engine.generate([5, 6], few(40)))
        task = asyncio.create_task(engine.generate([1, 2, 3], few(80)))
        await gate.wait()
        for _ in range(3):
            gate.let()
            await gate.wait()
        request = next(r for r in inner.scheduler.requests() if r.params.max_tokens == 80)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(2):  # the step that was running, and one more
            gate.let()
            await gate.wait()
        assert request.finish_reason == "abort"
        assert request.table.pages == request.table.scratch == []
        gate.let(always=True)
        assert (await neighbour).token_ids == continuation([5, 6], 40)
        await until_idle(inner)
        assert inner.pool.num_available == inner.pool.num_pages
        await engine.aclose()

    asyncio.run(main())


def test_leaving_a_stream_early_frees_its_pages() -> None:
    async def main() -> None:
        async with AsyncEngine(make_engine(random_trees(0))) as engine:
            async with aclosing(deltas(engine, [1, 2, 3], few(80))) as stream:
                async for _ in stream:
                    break
            await until_idle(engine.engine)
            assert engine.engine.pool.num_available == engine.engine.pool.num_pages

    asyncio.run(main())


def test_a_request_cancelled_while_it_is_submitted_leaves_nothing() -> None:
    async def main() -> None:
        inner = make_engine()
        begun, go = threading.Event(), threading.Event()
        submit = inner.submit
        made: list[Request] = []

        def slow(*args: Any, **options: Any) -> Request:
            begun.set()
            go.wait()
            made.append(submit(*args, **options))
            return made[0]

        inner.submit = slow  # type: ignore[method-assign]
        async with AsyncEngine(inner) as engine:
            task = asyncio.create_task(engine.generate([1], few(90)))
            await asyncio.to_thread(begun.wait)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            go.set()
            while not made:
                await asyncio.sleep(0)
            await until_idle(inner)
            assert inner.pool.num_available == inner.pool.num_pages

    asyncio.run(main())


def test_a_refused_request_raises_and_its_neighbours_go_on() -> None:
    async def main() -> None:
        async with AsyncEngine(make_engine(random_trees(0))) as engine:
            neighbour = asyncio.create_task(engine.generate([5, 6], few(40)))
            for prompt in ([VOCAB], [], [1.5]):
                with pytest.raises(RequestError, match="prompt"):
                    await engine.generate(cast("list[int]", prompt), few())
            with pytest.raises(RequestError, match="prompt"):
                await engine.generate_all([[1], [VOCAB]], few())
            assert (await neighbour).token_ids == continuation([5, 6], 40)

    asyncio.run(main())


def test_speculation_is_each_requests_own_choice() -> None:
    async def main() -> None:
        async with AsyncEngine(make_engine(random_trees(0))) as engine:
            on, off = await asyncio.gather(
                engine.generate([1, 2], few(30)),
                engine.generate([1, 2], SamplingParams(max_tokens=30, speculation=Speculation(enabled=False))))
            assert on.token_ids == off.token_ids == continuation([1, 2], 30)
            assert on.statistics.drafted > 0
            assert off.statistics.drafted == 0
            assert off.statistics.steps == 29

    asyncio.run(main())


def test_threads_and_coroutines_share_one_engine() -> None:
    async def main() -> None:
        async with AsyncEngine(make_engine(random_trees(0), num_pages=60)) as engine:
            tasks = [asyncio.create_task(engine.generate([i], few(20))) for i in range(8)]
            others = await asyncio.gather(*(asyncio.to_thread(engine.engine.generate, [[7, i]], few(20)) for i in range(8)))
            assert [r.token_ids for (r,) in others] == [continuation([7, i], 20) for i in range(8)]
            assert [(await task).token_ids for task in tasks] == [continuation([i], 20) for i in range(8)]

    asyncio.run(main())


def test_closing_ends_streams_with_an_error_and_the_thread() -> None:
    async def main() -> None:
        inner = make_engine()
        gate = Gate(inner)
        engine = AsyncEngine(inner)
        tasks = [asyncio.create_task(engine.generate([i], few(90))) for i in range(3)]
        await gate.wait()
        closing = asyncio.create_task(engine.aclose())
        while not engine._stopping:  # its thread may come late; steps of the fake device are soon over
            await asyncio.sleep(0)
        gate.let(always=True)
        await closing
        for task in tasks:
            with pytest.raises(DeviceError, match="closed"):
                await task
        assert not engine._thread.is_alive()
        assert inner.device.closed == 1  # type: ignore[attr-defined]
        await engine.aclose()
        with pytest.raises(DeviceError, match="closed"):
            await engine.generate([1], few())

    asyncio.run(main())


def test_a_broken_step_reaches_every_coroutine_and_ends_the_thread() -> None:
    async def main() -> None:
        inner = make_engine()

        def broken() -> None:
            raise OSError("device gone")

        inner._forward.run = broken  # type: ignore[method-assign]
        engine = AsyncEngine(inner)
        results = await asyncio.gather(*(engine.generate([i], few()) for i in range(3)), return_exceptions=True)
        assert [type(r) for r in results] == [DeviceError] * 3
        assert all("device gone" in str(r) for r in results)
        await engine.aclose()
        assert not engine._thread.is_alive()

    asyncio.run(main())


class Stranded:
    """A request whose first step waits at the gate, and the event loop that reads it, about to be gone."""

    def __init__(self) -> None:
        self.inner = make_engine()
        self.gate = Gate(self.inner)
        self.engine = AsyncEngine(self.inner)
        self.loop = asyncio.new_event_loop()
        self.task = self.loop.create_task(self.engine.generate([1], few(90)))
        self.loop.run_until_complete(self.gate.wait())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())

    def lose_the_loop(self) -> None:
        self.loop._ready.clear()  # type: ignore[attr-defined]  # as if its thread had died
        self.loop.close()
        self.gate.let(always=True)
        with self.inner._news:
            assert self.inner._news.wait_for(lambda: not self.inner.has_work and not self.inner._stepping, 60)
        self.engine.close()
        self.task._log_destroy_pending = False  # type: ignore[attr-defined]


def test_a_loop_that_is_gone_aborts_its_requests() -> None:
    stranded = Stranded()
    stranded.lose_the_loop()
    assert stranded.inner.pool.num_available == stranded.inner.pool.num_pages
    assert stranded.inner.statistics.tokens < 5


def test_a_loop_that_closes_with_news_on_their_way_aborts_its_requests() -> None:
    stranded = Stranded()
    stranded.gate.let()  # its first token is published, and the loop is called
    assert stranded.gate.entered.acquire(timeout=60)
    stranded.lose_the_loop()
    assert stranded.inner.pool.num_available == stranded.inner.pool.num_pages
    assert stranded.inner.statistics.tokens < 5


def test_a_step_wakes_an_event_loop_once_for_all_of_its_requests() -> None:
    async def main() -> tuple[int, int]:
        calls = 0
        loop = asyncio.get_running_loop()
        call_soon = loop.call_soon_threadsafe

        def counted(*args: Any, **kwargs: Any) -> asyncio.Handle:
            nonlocal calls
            calls += getattr(args[0], "__name__", "") == "_set"
            return call_soon(*args, **kwargs)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign,assignment]
        inner = make_engine()
        gate = Gate(inner)
        async with AsyncEngine(inner) as engine:
            tasks = [asyncio.create_task(engine.generate([i], few(5))) for i in range(4)]
            await gate.wait()
            scheduler = inner.scheduler
            while len(inner._inbox) + len(scheduler.running) + len(scheduler.waiting) < 4:  # threads submit them
                await asyncio.sleep(0)
            steps = 0

            def count() -> None:
                nonlocal steps
                steps += 1

            gate.run, run = (lambda: (count(), run())), gate.run  # type: ignore[assignment,return-value]
            gate.let(always=True)
            await asyncio.gather(*tasks)
            return calls, steps

    calls, steps = asyncio.run(main())
    assert 0 < calls <= steps
