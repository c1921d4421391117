"""A step that hangs is never silent: its threads are dumped, its requests end with an error, and /health says so."""

from __future__ import annotations

import faulthandler
import sys
import threading
from collections.abc import Callable

from mlsdc.runtime.engine import Engine
from mlsdc.runtime.errors import DeviceError
from mlsdc.runtime.server.log import LOGGER


class Watchdog:
    """Looks at an engine's running step from a thread of its own."""

    def __init__(self, engine: Engine, timeout_s: float, *, dump: Callable[[], None] | None = None) -> None:
        self.engine = engine
        self.timeout_s = timeout_s
        self.fired = False
        self._dump = dump or (lambda: faulthandler.dump_traceback(sys.__stderr__ or sys.stderr, all_threads=True))
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Once; later calls do nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="mlsdc-watchdog", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(min(1.0, self.timeout_s / 4)):
            age = self.engine.step_age_s
            if age > self.timeout_s:
                self.fire(age)
                return

    def fire(self, age: float) -> None:
        """Dump and give the engine up: nothing can end a native call, so the process should be restarted."""
        self.fired = True
        scheduler = self.engine.scheduler
        state = {"step_age_s": round(age, 3), "running": [repr(r) for r in list(scheduler.running)],
                 "waiting": len(scheduler.waiting), "free_pages": self.engine.pool.num_available, "pages": self.engine.pool.num_pages}
        LOGGER.critical("a step hangs: the engine is given up; restart the process", extra={"fields": state})
        self._dump()
        self.engine.fail(DeviceError(f"a step has been running for {age:.1f} s"))
