"""Runs the app under uvicorn until SIGTERM or Ctrl-C, then lets the requests that run come to their end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from mlsdc.runtime.async_engine import AsyncEngine
from mlsdc.runtime.errors import MlsdcError
from mlsdc.runtime.server import log
from mlsdc.runtime.server.app import create_app
from mlsdc.runtime.server.settings import ServerSettings
from mlsdc.runtime.server.state import Server


class DrainingServer(uvicorn.Server):
    """The first signal refuses new requests and waits for the others; the second one waits no more."""

    def __init__(self, config: uvicorn.Config, server: Server, *ready: str) -> None:
        super().__init__(config)
        self.server = server
        self.ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for line in self.ready:
            log.LOGGER.info(line)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._drain)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _drain(self) -> None:
        log.LOGGER.info("shutting down" if not self.should_exit else "shutting down now")
        self.server.draining = True
        self.force_exit = self.should_exit
        self.should_exit = True


def serve(engine: AsyncEngine, settings: ServerSettings, *, host: str, port: int, log_level: str = "info") -> int:
    """Serve until told to stop; the exit code. Owns the engine. `port` 0 takes a free one. Raises MlsdcError."""
    log.configure(log_level)
    app = create_app(engine, settings)
    try:
        bound = listen(host, port)
    except OSError as error:
        engine.close()
        raise MlsdcError(f"--host {host} --port {port}: {error.strerror or error}") from None
    address = bound.getsockname()
    config = uvicorn.Config(
        app, log_config=None, access_log=False, server_header=False, date_header=False, lifespan="on", timeout_keep_alive=30,
        timeout_graceful_shutdown=max(1, round(settings.drain_timeout_s)))
    server: Server = app.state.server
    device = engine.engine.device
    ready = (f"serving {server.model} at http://{_printable(address)}",
             f"device {device.name}{f'; kernels: {device.kernel_note}' if device.kernel_note else ''}")
    running = DrainingServer(config, server, *ready)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(running.serve(sockets=[bound]))
    finally:
        bound.close()
    if server.watchdog.fired:  # the hung step's thread cannot be ended
        sys.stderr.flush()
        os._exit(1)
    return 0


def listen(host: str, port: int) -> socket.socket:
    """Raises OSError."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(2048)
    except OSError:
        bound.close()
        raise
    return bound


def _printable(address: Any) -> str:
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _loop_factory() -> Any:
    """uvloop's event loop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
