"""From a checked body to tokens: parameters, submission, and the deltas of all its prompts as they come.

A `Generation` owns what it submitted: leaving it (`close`), for whatever reason, aborts what has not ended.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from mlsdc.runtime.async_engine import Submission
from mlsdc.runtime.errors import RequestError
from mlsdc.runtime.request import Delta, Request
from mlsdc.runtime.sampling_params import Grammar, SamplingParams, Speculation
from mlsdc.runtime.server import requests as R
from mlsdc.runtime.server.errors import ApiError
from mlsdc.runtime.server.metrics import ChoiceMeter
from mlsdc.runtime.server.settings import ServerSettings
from mlsdc.runtime.server.state import Server
from mlsdc.runtime.statistics import Statistics

PASSED_ON = ("n", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "stop_token_ids",
             "min_tokens")
JSON_OBJECT = Grammar("json_object")
Deltas = AsyncGenerator[tuple[int, Request, Delta], None]


def grammar_of(body: R.Generation, settings: ServerSettings) -> Grammar | None:
    """What `response_format` asks for. Raises RequestError."""
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    if (wanted.json_schema is None) == (wanted.type == "json_schema"):
        raise RequestError("response_format.json_schema: expected with type 'json_schema', and only there")
    if wanted.json_schema is None:
        return JSON_OBJECT
    text = json.dumps(wanted.json_schema.schema_)
    if len(text) > settings.max_schema_bytes:
        raise RequestError(f"response_format.json_schema.schema: {len(text)} bytes, at most {settings.max_schema_bytes}")
    return Grammar("json_schema", text)


def sampling_fields(body: R.Generation) -> dict[str, Any]:
    """SamplingParams' fields that both kinds of completion share; a null is the default, OpenAI's where it has one."""
    given = {name: value for name in PASSED_ON if (value := getattr(body, name)) is not None}
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    speculation = body.speculation and Speculation(
        body.speculation.enabled, body.speculation.max_draft_tokens,
        None if body.speculation.levels is None else tuple(body.speculation.levels))
    return {
        **given, "stop": stop, "speculation": speculation, "temperature": 1.0 if body.temperature is None else body.temperature,
        "logit_bias": {int(token): bias for token, bias in (body.logit_bias or {}).items()},
        "include_stop_str_in_output": body.include_stop_str_in_output, "ignore_eos": body.ignore_eos,
        "skip_special_tokens": body.skip_special_tokens,
    }


class Generation:
    """The prompts of one HTTP request in the engine. Choice c of prompt p has the index p * n + c."""

    def __init__(self, server: Server, submissions: Sequence[Submission], deadline: float | None) -> None:
        self.server = server
        self.submissions = submissions
        self.requests = [submission.request for submission in submissions]
        self._deadline = deadline  # on the event loop's clock
        self.on_close: Callable[[], None] | None = None
        self._meters = {choice.id: ChoiceMeter(server.metrics, choice) for request in self.requests for choice in request.choices}

    @staticmethod
    async def start(server: Server, prompts: Sequence[list[int]], params: SamplingParams, body: R.Generation) -> Generation:
        """Submit all prompts or none. Raises ApiError, RequestError, DeviceError."""
        settings = server.settings
        seconds = settings.deadline_s if body.deadline_s is None else body.deadline_s
        if seconds is not None and seconds > settings.max_deadline_s:
            raise RequestError(f"deadline_s: {seconds:g}, at most {settings.max_deadline_s:g}")
        submissions: list[Submission] = []
        with server.entering(len(prompts) * params.n):
            try:
                for prompt in prompts:
                    submission = await server.engine.submit(prompt, params, priority=body.priority)
                    submissions.append(submission)
                    server.entered(submission.request)
            except BaseException:
                for submission in submissions:
                    submission.abort()
                raise
        deadline = None if seconds is None else asyncio.get_running_loop().time() + seconds
        return Generation(server, submissions, deadline)

    async def deltas(self) -> Deltas:
        """(index of the choice, its request, what came). Raises ApiError at the deadline, DeviceError."""
        source = self._single() if len(self.submissions) == 1 else self._merged()
        try:
            while (item := await self._next(source)) is not None:
                index, choice, delta = item
                meter = self._meters[choice.id]
                if delta.token_ids:
                    meter.tokens(len(delta.token_ids))
                if delta.finish_reason is not None:
                    meter.end(delta.finish_reason)
                yield index, choice, delta
        finally:
            await source.aclose()

    async def _next(self, source: Deltas) -> tuple[int, Request, Delta] | None:
        if self._deadline is None:
            return await anext(source, None)
        try:
            async with asyncio.timeout_at(self._deadline):
                return await anext(source, None)
        except TimeoutError:
            raise ApiError(408, "deadline_s: the request's time is up", param="deadline_s", code="deadline_exceeded") from None

    async def finish(self) -> None:
        """Wait for the end of all choices."""
        async for _ in self.deltas():
            pass

    async def _single(self) -> Deltas:
        (submission,) = self.submissions
        async for delta in submission.deltas():
            yield delta.choice, submission.request.choices[delta.choice], delta

    async def _merged(self) -> Deltas:
        """The deltas of several prompts in the order they come."""
        queue: asyncio.Queue[tuple[int, Delta] | BaseException | None] = asyncio.Queue()

        async def pump(place: int, submission: Submission) -> None:
            try:
                async for delta in submission.deltas():
                    queue.put_nowait((place, delta))
                queue.put_nowait(None)
            except Exception as error:
                queue.put_nowait(error)

        tasks = [asyncio.ensure_future(pump(place, submission)) for place, submission in enumerate(self.submissions)]
        left = len(tasks)
        try:
            while left:
                item = await queue.get()
                if item is None:
                    left -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    place, delta = item
                    request = self.requests[place]
                    yield place * len(request.choices) + delta.choice, request.choices[delta.choice], delta
        finally:
            for task in tasks:
                task.cancel()

    def close(self, reason: str = "abort") -> None:
        """Abort what has not ended; safe to call again."""
        for submission in self.submissions:
            submission.abort()
        for meter in self._meters.values():
            meter.end(reason)
        if self.on_close is not None:
            self.on_close()

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage, and what speculation did for all choices together."""
        total = Statistics()
        completion = 0
        for request in self.requests:
            for choice in request.choices:
                total.merge(choice.statistics)
                completion += choice.num_output
        return usage(sum(request.num_prompt for request in self.requests), completion, total)

    def log_fields(self) -> dict[str, Any]:
        choices = [choice for request in self.requests for choice in request.choices]
        first = [t - c.timings.submitted for c in choices if (t := c.timings.first_token) is not None]
        return {
            "prompt_tokens": sum(request.num_prompt for request in self.requests),
            "completion_tokens": sum(choice.num_output for choice in choices),
            "drafted": sum(choice.statistics.drafted for choice in choices), "accepted": sum(c.statistics.accepted for c in choices),
            "ttft_ms": round(1000 * min(first), 2) if first else None,
            "finish_reasons": [choice.finish_reason for choice in choices],
            "engine_ids": [choice.id for choice in choices],
            "age_s": round(time.perf_counter() - min(c.timings.submitted for c in choices), 4),
        }


def usage(prompt_tokens: int, completion_tokens: int, statistics: Statistics) -> dict[str, Any]:
    figures = dict(statistics.to_dict())
    levels = {
        name: {"drafted": level.drafted, "accepted": level.accepted, "acceptance_rate": level.acceptance_rate,
               "per_position": [{"offered": d.offered, "accepted": d.accepted} for d in level.depths]}
        for name, level in statistics.levels.items()
    }
    return {
        "prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": min(statistics.cached_tokens, prompt_tokens)},
        "speculation": {name: figures[name] for name in ("steps", "drafted", "accepted", "acceptance_rate", "acceptance_length")}
        | {"levels": levels},
    }
