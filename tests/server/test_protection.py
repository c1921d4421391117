"""Overload, hang-ups, deadlines, a stuck step: nothing is lost, nothing leaks, the neighbours go on."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import pytest
from rig import HI, Rig, serving, text_after

from mlsdc.runtime.errors import RequestError
from mlsdc.runtime.server import ServerSettings


class Hold:
    """Keeps the engine inside a step until it is let go."""

    def __init__(self, rig: Rig) -> None:
        self.go = threading.Event()
        engine = rig.engine.engine
        self.start = engine._forward.start
        engine._forward.start = self  # type: ignore[method-assign,assignment]

    def __call__(self) -> None:
        assert self.go.wait(60)
        self.start()


async def idle(rig: Rig) -> None:
    inner = rig.engine.engine

    def wait() -> None:
        with inner._news:
            assert inner._news.wait_for(lambda: not inner._stepping and not inner.has_work, 60)

    await asyncio.to_thread(wait)
    assert inner.pool.num_available == inner.pool.num_pages


async def hang_up(rig: Rig, path: str, body: dict[str, Any], *, after_first_event: bool) -> None:
    """A client that disconnects: while its answer is made, or after the first event of it."""
    leave = asyncio.Event()
    scope, receive = request(path, body, leave)

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body" and message.get("body"):
            leave.set()

    if not after_first_event:
        asyncio.get_running_loop().call_later(0.05, leave.set)
    await rig.app(scope, receive, send)


def request(path: str, body: dict[str, Any], leave: asyncio.Event) -> tuple[dict[str, Any], Any]:
    """Scope and `receive` of a client that disconnects at `leave`."""
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST", "path": path,
        "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http", "client": ("test", 1), "server": ("test", 80),
        "headers": [(b"content-type", b"application/json")],
    }

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await leave.wait()
        return {"type": "http.disconnect"}

    return scope, receive


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_client_that_hangs_up_frees_its_pages(stream: bool, path: str) -> None:
    async def main() -> None:
        async with serving() as rig:
            hold = Hold(rig)
            body = {"messages": HI} if "chat" in path else {"prompt": ["a", "b"]}
            task = asyncio.ensure_future(hang_up(rig, path, {**body, "max_tokens": 300, "stream": stream}, after_first_event=stream))
            if stream:
                hold.go.set()
                await task
            else:
                await task  # gone while the first step runs
                hold.go.set()
            await idle(rig)
            assert await rig.metric("request_success_total") == (1 if "chat" in path else 2)
            assert "abort" in (await rig.http.get("/metrics")).text

    asyncio.run(main())


def test_a_client_that_is_gone_before_the_first_byte_of_its_stream_frees_its_pages() -> None:
    """A server may say so by raising where the answer's head is sent: the events were never begun then."""
    async def main() -> None:
        async with serving() as rig:
            hold = Hold(rig)

            async def gone(message: Any) -> None:
                raise OSError("connection lost")

            await rig.app(*request("/v1/chat/completions", {"messages": HI, "max_tokens": 300, "stream": True}, asyncio.Event()), gone)
            hold.go.set()
            await idle(rig)
            assert "abort" in (await rig.http.get("/metrics")).text

    asyncio.run(main())


def test_a_normal_end_aborts_nothing() -> None:
    async def main() -> None:
        async with serving() as rig:
            aborted: list[Any] = []
            rig.engine.engine.abort = aborted.append  # type: ignore[method-assign]
            for stream in (False, True):
                await rig.http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 9, "stream": stream})
            assert aborted == []

    asyncio.run(main())


def test_what_would_wait_too_long_is_a_429_and_the_rest_is_served() -> None:
    """F11: 4 may wait beside the 2 that run."""
    async def main() -> None:
        async with serving(settings=ServerSettings(max_queue=4), max_num_seqs=2) as rig:
            hold = Hold(rig)
            tasks = [
                asyncio.ensure_future(rig.http.post("/v1/completions", json={"prompt": f"p{i}", "max_tokens": 20, "temperature": 0}))
                for i in range(20)
            ]
            done, _ = await asyncio.wait(tasks, timeout=60, return_when=asyncio.FIRST_COMPLETED)
            while len(done) < 14:
                done, _ = await asyncio.wait(tasks, timeout=0.01)
            hold.go.set()
            answers = await asyncio.gather(*tasks)
            refused = [answer for answer in answers if answer.status_code == 429]
            assert len(refused) == 14
            assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
            assert refused[0].json()["error"]["type"] == "rate_limit_error"
            for i, answer in enumerate(answers):
                if answer.status_code == 200:
                    assert answer.json()["choices"][0]["text"] == text_after(f"p{i}", 20)
            assert await rig.metric("request_refused_total") == 14
            assert (await rig.http.post("/v1/completions", json={"prompt": ["a"] * 7, "max_tokens": 2})).status_code == 429
            assert (await rig.http.post("/v1/completions", json={"prompt": ["a"] * 6, "max_tokens": 2})).status_code == 200

    asyncio.run(main())


def test_a_deadline_ends_a_request_whole_and_streamed() -> None:
    async def main() -> None:
        async with serving() as rig:
            hold = Hold(rig)
            body = {"messages": HI, "max_tokens": 50, "deadline_s": 0.05}
            whole, streamed = await asyncio.gather(
                rig.http.post("/v1/chat/completions", json=body), rig.http.post("/v1/chat/completions", json={**body, "stream": True}))
            assert (whole.status_code, whole.json()["error"]["code"]) == (408, "deadline_exceeded")
            last = json.loads(streamed.text.strip().splitlines()[-1].removeprefix("data: "))
            assert last["error"]["code"] == "deadline_exceeded"
            hold.go.set()
            await idle(rig)

    asyncio.run(main())


def test_a_reader_that_does_not_read_loses_its_stream_and_holds_up_nobody() -> None:
    async def main() -> None:
        async with serving(settings=ServerSettings(write_timeout_s=0.05)) as rig:
            body = json.dumps({"messages": HI, "max_tokens": 300, "stream": True}).encode()
            messages = [{"type": "http.request", "body": body, "more_body": False}]
            scope = {
                "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": "/v1/chat/completions",
                "raw_path": b"/v1/chat/completions", "query_string": b"", "root_path": "", "scheme": "http", "client": ("t", 1),
                "server": ("t", 80), "headers": [],
            }

            async def receive() -> Any:
                if messages:
                    return messages.pop()
                return await asyncio.Event().wait()

            async def send(message: Any) -> None:
                if message["type"] == "http.response.body":
                    await asyncio.Event().wait()

            stuck = asyncio.ensure_future(rig.app(scope, receive, send))
            answer = await rig.http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 40, "temperature": 0})
            assert answer.json()["choices"][0]["text"] == text_after("ab", 40)
            await stuck
            await idle(rig)

    asyncio.run(main())


def test_a_step_that_hangs_is_dumped_and_ends_in_errors() -> None:
    """F10, A18: /health says so, the streams end, no request waits for ever."""
    async def main() -> None:
        dumps: list[float] = []
        async with serving(settings=ServerSettings(step_timeout_s=0.2)) as rig:
            rig.server.watchdog._dump = lambda: dumps.append(time.monotonic())
            hold = Hold(rig)
            assert (await rig.http.get("/health")).status_code == 200
            whole, streamed = await asyncio.gather(
                rig.http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 5}),
                rig.http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 5, "stream": True}))
            assert whole.status_code == 503
            assert "a step has been running" in whole.json()["error"]["message"]
            assert "a step has been running" in streamed.text
            assert len(dumps) == 1
            for path in ("/health", "/ready"):
                assert (await rig.http.get(path)).status_code == 503
            assert (await rig.http.post("/v1/chat/completions", json={"messages": HI})).status_code == 503
            assert await rig.metric("engine_alive") == 0
            hold.go.set()
            await asyncio.to_thread(rig.engine.close)

    asyncio.run(main())


def test_a_server_that_shuts_down_takes_nobody_new_and_lets_the_others_end() -> None:
    async def main() -> None:
        async with serving() as rig:
            hold = Hold(rig)
            running = asyncio.ensure_future(rig.http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 30, "temperature": 0}))
            while not rig.server.num_inside():
                await asyncio.sleep(0)
            rig.server.draining = True
            assert (await rig.http.get("/ready")).status_code == 503
            assert (await rig.http.get("/health")).status_code == 200
            refused = await rig.http.post("/v1/completions", json={"prompt": "ab"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
            hold.go.set()
            assert (await running).json()["choices"][0]["text"] == text_after("ab", 30)

    asyncio.run(main())


@pytest.mark.parametrize("field", ["max_queue", "step_timeout_s", "max_body_bytes"])
def test_settings_that_make_no_sense_are_refused(field: str) -> None:
    with pytest.raises(RequestError, match=f"^{field}: -1"):
        ServerSettings(**{field: -1})
