"""What all requests of one app share: the engine, who may come in, and whether it still serves."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mlsdc.runtime.async_engine import AsyncEngine
from mlsdc.runtime.errors import RequestError
from mlsdc.runtime.request import Request
from mlsdc.runtime.sampling_params import SamplingParams
from mlsdc.runtime.server.errors import ApiError
from mlsdc.runtime.server.metrics import Metrics
from mlsdc.runtime.server.settings import ServerSettings
from mlsdc.runtime.server.watchdog import Watchdog
from mlsdc.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mlsdc.runtime.server.generation import Generation


class Server:
    """One engine and its guests. All but `admit`'s callers run on the event loop."""

    def __init__(self, engine: AsyncEngine, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.manifest = engine.engine.manifest
        self.model = settings.served_model_name or self.manifest.model.name
        self.created = int(time.time())
        parts = repr((sorted(self.manifest.files.items()), sorted(self.manifest.weights.items())))
        self.fingerprint = f"mlsdc-{hashlib.sha256(parts.encode()).hexdigest()[:12]}"
        self.draining = False
        self.metrics = Metrics(engine.engine, self.model)
        engine.engine.watch_steps(self.metrics.step)
        self.watchdog = Watchdog(engine.engine, settings.step_timeout_s)
        self._inside: set[Request] = set()  # requests whose choices may still run
        self._entering = 0  # choices that are being submitted

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ApiError: without one there is no text to serve."""
        if self.engine.engine.tokenizer is None:
            raise ApiError(503, "this artifact has no tokenizer: text cannot be served", code="no_tokenizer")
        return self.engine.engine.tokenizer

    @property
    def max_model_len(self) -> int:
        return self.manifest.limits.max_model_len

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model:
            raise ApiError(404, f"model: '{name}' is not served here; '{self.model}' is", param="model", code="model_not_found")

    @contextmanager
    def entering(self, choices: int) -> Iterator[None]:
        """Room for `choices` more while they are submitted; `entered` then holds it. Raises ApiError 429, 503."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after=5)
        scheduler = self.engine.engine.scheduler
        room = scheduler.max_running + self.settings.max_queue
        inside = self.num_inside() + self._entering
        if inside + choices > room or len(scheduler.waiting) > self.settings.max_queue:
            raise ApiError(429, f"{inside} choices run or wait here, at most {room} may: try again later", code="queue_full",
                           retry_after=1 + inside // scheduler.max_running)
        self._entering += choices
        try:
            yield
        finally:
            self._entering -= choices

    def num_inside(self) -> int:
        """Choices that run or wait. They count until they have ended in the engine, whether their client reads or not."""
        self._inside = {request for request in self._inside if not all(choice.finished for choice in request.choices)}
        return sum(not choice.finished for request in self._inside for choice in request.choices)

    def entered(self, request: Request) -> None:
        self._inside.add(request)

    def fill_vocabulary(self) -> None:
        """Know how every token reads before it comes, if there is a tokenizer."""
        if self.engine.engine.tokenizer is not None:
            self.engine.engine.tokenizer.vocabulary.fill()

    def encode(self, text: str, name: str, *, add_special_tokens: bool = True, bounded: bool = True) -> list[int]:
        """Token ids of a text. If `bounded`, one that cannot fit is refused before the tokenizer reads it. Raises RequestError."""
        if bounded and len(text) > self.max_model_len * self._longest_token:
            raise RequestError(f"{name}: {len(text)} characters, more than any {self.max_model_len} tokens are")
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    @cached_property
    def _longest_token(self) -> int:
        """Characters of the longest token."""
        vocabulary = self.tokenizer.tokenizer.get_vocab()
        return max(map(len, vocabulary))

    def params(self, **fields: Any) -> SamplingParams:
        """Raises RequestError."""
        limits = self.settings
        stop = fields.get("stop") or ()
        if len(stop) > limits.max_stop:
            raise RequestError(f"stop: {len(stop)} strings, at most {limits.max_stop}")
        for i, text in enumerate(stop):
            if len(text) > limits.max_stop_chars:
                raise RequestError(f"stop[{i}]: {len(text)} characters, at most {limits.max_stop_chars}")
        if fields.get("n", 1) > limits.max_n:
            raise RequestError(f"n: {fields['n']}, at most {limits.max_n}")
        if (fields.get("logprobs") or 0) > limits.max_logprobs:
            raise RequestError(f"logprobs: {fields['logprobs']}, at most {limits.max_logprobs}")
        return SamplingParams(**fields)

    def log_at_end(self, fields: dict[str, Any], generation: Generation) -> None:
        """Put what `generation` did into its request's log line once it is closed."""
        generation.on_close = lambda: fields.update(generation.log_fields())

    async def close(self) -> None:
        """Free the engine. One that hangs cannot be waited for: its process must end."""
        self.draining = True
        await asyncio.to_thread(self.watchdog.stop)
        if not self.watchdog.fired:
            await self.engine.aclose()

    def health(self) -> str | None:
        """What is wrong with the engine, None if it lives. A long queue is not wrong."""
        if not self.engine.engine.alive:
            return "the engine has stopped"
        age = self.engine.engine.step_age_s
        if age > self.settings.step_timeout_s:
            return f"a step has been running for {age:.1f} s"
        return None
