"""/v1/chat/completions: the conversation through the model's own template, the answer whole or streamed."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from mlsdc.runtime.errors import MlsdcError, RequestError
from mlsdc.runtime.request import Request as EngineRequest
from mlsdc.runtime.server.errors import ApiError, api_error
from mlsdc.runtime.server.generation import Generation, sampling_fields
from mlsdc.runtime.server.requests import ChatRequest, Message
from mlsdc.runtime.server.sse import DONE, event
from mlsdc.runtime.server.state import Server
from mlsdc.runtime.server.tokens import TokenCutter, chat_logprob

RESERVED = ("messages", "add_generation_prompt", "tools", "bos_token", "eos_token")


class Chat:
    """One request to /v1/chat/completions."""

    def __init__(self, server: Server, body: ChatRequest) -> None:
        """Raises ApiError, RequestError."""
        server.check_model(body.model)
        if body.stream_options is not None and not body.stream:
            raise RequestError("stream_options: expected only where stream is true")
        if body.top_logprobs is not None and not body.logprobs:
            raise RequestError("top_logprobs: expected only where logprobs is true")
        if body.max_tokens is not None and body.max_completion_tokens is not None and body.max_tokens != body.max_completion_tokens:
            raise RequestError("max_tokens: another number than max_completion_tokens, which is its newer name")
        if body.max_tokens == 0:
            raise RequestError("max_tokens: 0, expected at least 1")
        for name in body.chat_template_kwargs or ():
            if name in RESERVED:
                raise RequestError(f"chat_template_kwargs.{name}: set by the request itself")
        self.server = server
        self.body = body
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.top = body.top_logprobs or 0
        self.params = server.params(
            **sampling_fields(body), max_tokens=body.max_completion_tokens or body.max_tokens,
            logprobs=self.top if body.logprobs else None)

    async def start(self) -> Generation:
        """Raises ApiError, RequestError, DeviceError."""
        tokens = await asyncio.to_thread(self._tokens)
        return await Generation.start(self.server, [tokens], self.params, self.body)

    def _tokens(self) -> list[int]:
        text = self.server.tokenizer.render_chat(template_messages(self.body.messages), **(self.body.chat_template_kwargs or {}))
        return self.server.encode(text, "messages", add_special_tokens=False)

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.server.model,
                "system_fingerprint": self.server.fingerprint}

    async def whole(self, generation: Generation) -> dict[str, Any]:
        try:
            await generation.finish()
            (request,) = generation.requests
            return {
                **self.head("chat.completion"), "choices": [self._choice(choice) for choice in request.choices],
                "usage": generation.usage(),
            }
        finally:
            generation.close()

    def _choice(self, choice: EngineRequest) -> dict[str, Any]:
        result = choice.result()
        logprobs = None
        if result.logprobs is not None:
            logprobs = {"content": [chat_logprob(self.server.tokenizer, entry, self.top) for entry in result.logprobs]}
        return {
            "index": choice.choice, "message": {"role": "assistant", "content": result.text}, "logprobs": logprobs,
            "finish_reason": result.finish_reason, "stop_reason": result.stop_reason,
        }

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """The role of each choice, then one event a token."""
        options = self.body.stream_options
        with_usage = options is not None and options.include_usage
        head = self.head("chat.completion.chunk")
        chunk_head = head | ({"usage": None} if with_usage else {})
        skip = self.body.skip_special_tokens
        cutters = [TokenCutter(self.server.tokenizer, skip_special_tokens=skip) for _ in range(self.params.n)]
        try:
            yield b"".join(
                event({**chunk_head, "choices": [chunk(index, {"role": "assistant", "content": ""})]}) for index in range(self.params.n))
            async for index, choice, delta in generation.deltas():
                pieces = cutters[index].cut(delta)
                out = b""
                for i, piece in enumerate(pieces):
                    reason = delta.finish_reason if i == len(pieces) - 1 else None
                    logprobs = None
                    if delta.logprobs is not None and i < len(delta.logprobs):
                        logprobs = {"content": [chat_logprob(self.server.tokenizer, delta.logprobs[i], self.top)]}
                    out += event({**chunk_head, "choices": [chunk(
                        index, {"content": piece}, logprobs, reason, choice.stop_reason if reason == "stop" else None)]})
                yield out
            if with_usage:
                yield event({**head, "choices": [], "usage": generation.usage()})
            yield DONE
        except (MlsdcError, ApiError) as error:
            yield event((error if isinstance(error, ApiError) else api_error(error)).body())
        finally:
            generation.close()


def chunk(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, reason: str | None = None,
          stop_reason: int | str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason, "stop_reason": stop_reason}


def template_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates know them: text, and only the fields that were given."""
    found = []
    for i, message in enumerate(messages):
        content = message.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        if content is None and not message.tool_calls:
            raise RequestError(f"messages[{i}].content: missing")
        entry: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": content or ""}
        if message.name is not None:
            entry["name"] = message.name
        if message.tool_call_id is not None:
            entry["tool_call_id"] = message.tool_call_id
        found.append(entry)
    return found
