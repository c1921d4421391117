"""A server that a benchmark starts in a process of its own and ends again."""

from __future__ import annotations

import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mlsdc.runtime.errors import MlsdcError

START_S, STOP_S = 120, 60


@contextmanager
def serving(command: Sequence[str], *, name: str, ready: str) -> Iterator[tuple[str, float]]:
    """Run `command --port PORT`, a free one: (URL, seconds until the path `ready` was a 200). Raises MlsdcError with its last line."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    started = time.perf_counter()
    with tempfile.TemporaryFile() as said:  # not a pipe: nobody reads while it serves
        try:
            process = subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=said)
        except OSError as error:
            raise MlsdcError(f"{name}: cannot be started: {error.strerror}") from None
        try:
            while not _answers(f"{url}{ready}"):
                if process.poll() is not None:
                    said.seek(0)
                    lines = said.read().decode(errors="replace").strip().splitlines() or [f"nothing, and ended with {process.returncode}"]
                    raise MlsdcError(f"{name} ended: {lines[-1]}")
                if time.perf_counter() - started > START_S:
                    raise MlsdcError(f"{name}: not ready after {START_S} s")
                time.sleep(0.005)
            yield url, time.perf_counter() - started
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
