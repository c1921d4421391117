"""/v1/completions: text or token ids in, text out, whole or streamed, with echo and log probabilities."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from mlsdc.runtime.errors import MlsdcError, RequestError
from mlsdc.runtime.request import Request as EngineRequest
from mlsdc.runtime.request import TokenLogprobs
from mlsdc.runtime.sampling_params import SamplingParams
from mlsdc.runtime.server.errors import ApiError, api_error
from mlsdc.runtime.server.generation import Generation, grammar_of, sampling_fields
from mlsdc.runtime.server.requests import CompletionRequest
from mlsdc.runtime.server.sse import DONE, event
from mlsdc.runtime.server.state import Server
from mlsdc.runtime.server.tokens import CompletionLogprobs, TokenCutter

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class Completion:
    """One request to /v1/completions."""

    def __init__(self, server: Server, body: CompletionRequest) -> None:
        """Raises ApiError, RequestError."""
        server.check_model(body.model)
        if body.stream_options is not None and not body.stream:
            raise RequestError("stream_options: expected only where stream is true")
        self.server = server
        self.body = body
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.echo = bool(body.echo)
        wanted = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        self.only_echo = wanted == 0
        if self.only_echo and not self.echo:
            raise RequestError("max_tokens: 0, expected at least 1 (0 is for echo)")
        self.params: SamplingParams = server.params(
            **sampling_fields(body), max_tokens=max(1, wanted), logprobs=body.logprobs, grammar=grammar_of(body, server.settings),
            prompt_logprobs=body.logprobs if self.echo else None)

    async def start(self) -> Generation:
        """Raises ApiError, RequestError, DeviceError."""
        prompts = await asyncio.to_thread(self._prompts)
        return await Generation.start(self.server, prompts, self.params, self.body)

    def _prompts(self) -> list[list[int]]:
        prompt = self.body.prompt
        many: Any = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
        if len(many) > self.server.settings.max_prompts:
            raise RequestError(f"prompt: {len(many)} prompts, at most {self.server.settings.max_prompts}")
        return [self.server.encode(each, "prompt") if isinstance(each, str) else self.server.engine.engine.tokenize(each) for each in many]

    def head(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.server.model,
                "system_fingerprint": self.server.fingerprint}

    async def whole(self, generation: Generation) -> dict[str, Any]:
        await generation.finish()
        choices = [
            self._choice(place * len(request.choices) + number, request, choice)
            for place, request in enumerate(generation.requests) for number, choice in enumerate(request.choices)
        ]
        return {**self.head(), "choices": choices, "usage": self._usage(generation)}

    def _usage(self, generation: Generation) -> dict[str, Any]:
        found = generation.usage()
        if self.only_echo:
            found |= {"completion_tokens": 0, "total_tokens": found["prompt_tokens"]}
        return found

    def _choice(self, index: int, request: EngineRequest, choice: EngineRequest) -> dict[str, Any]:
        result = choice.result()
        prompt = self._prompt_text(request) if self.echo else ""
        logprobs = None
        if self.params.logprobs is not None:
            lines = CompletionLogprobs(self.server.tokenizer, self.params.logprobs)
            if self.echo:
                self._add_prompt(lines, request)
            if not self.only_echo:
                add_all(lines, self._cutter().cut_all(result.token_ids, result.text), result.token_ids, result.logprobs or [], len(prompt))
            logprobs = lines.take()
        text = prompt if self.only_echo else prompt + result.text
        reason = "length" if self.only_echo else result.finish_reason
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason,
                "stop_reason": None if self.only_echo else result.stop_reason}

    def _prompt_text(self, request: EngineRequest) -> str:
        return self.server.tokenizer.decode(request.tokens[: request.num_prompt], skip_special_tokens=False)

    def _add_prompt(self, lines: CompletionLogprobs, request: EngineRequest) -> None:
        tokens = request.tokens[: request.num_prompt]
        cutter = TokenCutter(self.server.tokenizer, skip_special_tokens=False)
        entries: list[TokenLogprobs | None] = [None, *(request.prompt_logprobs or [])]
        offset = 0
        for token, entry, piece in zip(tokens, entries, cutter.cut_all(tokens, self._prompt_text(request)), strict=True):
            lines.add(token, entry, offset)
            offset += len(piece)

    def _cutter(self) -> TokenCutter:
        return TokenCutter(self.server.tokenizer, skip_special_tokens=self.body.skip_special_tokens)

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """One event a token; the prompt's, with echo, is part of the first one's."""
        options = self.body.stream_options
        with_usage = options is not None and options.include_usage
        head = self.head() | ({"usage": None} if with_usage else {})
        writers: dict[int, _Writer] = {}
        try:
            async for index, choice, delta in generation.deltas():
                writer = writers.get(index)
                if writer is None:
                    request = generation.requests[index // self.params.n]
                    writer = writers[index] = _Writer(self, request)
                pieces = writer.cutter.cut(delta)
                if self.only_echo:
                    pieces = [""] if delta.finish_reason else []
                out = b""
                for i, piece in enumerate(pieces):
                    last = i == len(pieces) - 1
                    reason = ("length" if self.only_echo else delta.finish_reason) if last else None
                    out += event({**head, "choices": [writer.choice(
                        index, piece, reason, choice.stop_reason if reason == "stop" else None,
                        delta.token_ids[i] if not self.only_echo and i < len(delta.token_ids) else None,
                        delta.logprobs[i] if delta.logprobs and not self.only_echo else None)]})
                if out:
                    yield out
            if with_usage:
                yield event({**self.head(), "choices": [], "usage": self._usage(generation)})
            yield DONE
        except (MlsdcError, ApiError) as error:
            yield event((error if isinstance(error, ApiError) else api_error(error)).body())


class _Writer:
    """Writes the chunks of one choice of a stream."""

    def __init__(self, completion: Completion, request: EngineRequest) -> None:
        self.cutter = completion._cutter()
        self.prefix = completion._prompt_text(request) if completion.echo else ""
        self.lines = None
        if completion.params.logprobs is not None:
            self.lines = CompletionLogprobs(completion.server.tokenizer, completion.params.logprobs)
            if completion.echo:
                completion._add_prompt(self.lines, request)
        self.offset = len(self.prefix)

    def choice(self, index: int, piece: str, reason: str | None, stop_reason: int | str | None, token: int | None,
               entry: TokenLogprobs | None) -> dict[str, Any]:
        logprobs = None
        if self.lines is not None:
            if token is not None:
                self.lines.add(token, entry, self.offset)
            logprobs = self.lines.take()
        self.offset += len(piece)
        text, self.prefix = self.prefix + piece, ""
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason, "stop_reason": stop_reason}


def add_all(lines: CompletionLogprobs, pieces: list[str], tokens: list[int], entries: list[TokenLogprobs], offset: int) -> None:
    for token, entry, piece in zip(tokens, entries, pieces, strict=True):
        lines.add(token, entry, offset)
        offset += len(piece)


