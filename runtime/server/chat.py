"""/v1/chat/completions: the conversation through the model's own template, the answer whole or streamed."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from mlsdc.runtime.errors import MlsdcError, RequestError
from mlsdc.runtime.request import Request as EngineRequest
from mlsdc.runtime.server.errors import ApiError, api_error
from mlsdc.runtime.server.generation import Generation, grammar_of, sampling_fields
from mlsdc.runtime.server.requests import ChatRequest, Message, ToolCall
from mlsdc.runtime.server.sse import DONE, event
from mlsdc.runtime.server.state import Server
from mlsdc.runtime.server.tokens import TokenCutter, chat_logprob
from mlsdc.runtime.server.tools import Call, ToolFormat, ToolParser, chosen, tool_format

RESERVED = ("messages", "add_generation_prompt", "tools", "bos_token", "eos_token")


class Chat:
    """One request to /v1/chat/completions."""

    def __init__(self, server: Server, body: ChatRequest) -> None:
        """Raises ApiError, RequestError."""
        server.check_model(body.model)
        check_fields(body)
        self.server = server
        self.body = body
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.top = body.top_logprobs or 0
        self.style: ToolFormat | None = None
        fields = sampling_fields(body)
        grammar = grammar_of(body, server.settings)
        if body.tools is not None and body.tool_choice != "none":
            self.style = tool_format(server.tokenizer.chat_template)
            must = chosen(body.tools, body.tool_choice)
            if sum(len(tool.model_dump_json()) for tool in body.tools) > server.settings.max_schema_bytes:
                raise RequestError(f"tools: more than {server.settings.max_schema_bytes} bytes")
            if must is not None and grammar is not None:
                raise RequestError("tool_choice: a call is asked for, and response_format asks for something else")
            if must is not None:
                grammar = self.style.grammar(must, body.parallel_tool_calls is not False)
            fields["skip_special_tokens"] = False  # a marker may be one
        self.params = server.params(
            **fields, max_tokens=body.max_completion_tokens or body.max_tokens, logprobs=self.top if body.logprobs else None,
            grammar=grammar)

    async def start(self) -> Generation:
        """Raises ApiError, RequestError, DeviceError."""
        tokens = await asyncio.to_thread(self._tokens)
        return await Generation.start(self.server, [tokens], self.params, self.body)

    def _tokens(self) -> list[int]:
        variables = dict(self.body.chat_template_kwargs or {})
        if self.style is not None:
            variables["tools"] = [tool.model_dump(exclude_none=True) for tool in self.body.tools or ()]
        text = self.server.tokenizer.render_chat(template_messages(self.body.messages), **variables)
        return self.server.encode(text, "messages", add_special_tokens=False)

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.server.model,
                "system_fingerprint": self.server.fingerprint}

    def _parser(self) -> ToolParser | None:
        if self.style is None:
            return None
        names = [tool.function.name for tool in self.body.tools or ()]
        return ToolParser(self.style, names, parallel=self.body.parallel_tool_calls is not False)

    async def whole(self, generation: Generation) -> dict[str, Any]:
        await generation.finish()
        (request,) = generation.requests
        return {
            **self.head("chat.completion"), "choices": [self._choice(choice) for choice in request.choices],
            "usage": generation.usage(),
        }

    def _choice(self, choice: EngineRequest) -> dict[str, Any]:
        result = choice.result()
        logprobs = None
        if result.logprobs is not None:
            logprobs = {"content": [chat_logprob(self.server.tokenizer, entry, self.top) for entry in result.logprobs]}
        message: dict[str, Any] = {"role": "assistant", "content": result.text}
        reason: str | None = result.finish_reason
        parser = self._parser()
        if parser is not None:
            parts = parser.feed(result.text) + parser.finish()
            calls = [part.to_json() for part in parts if isinstance(part, Call)]
            if calls:
                text = "".join(part for part in parts if isinstance(part, str)).strip()
                message = {"role": "assistant", "content": text or None, "tool_calls": calls}
                reason = "tool_calls" if reason == "stop" else reason
        return {
            "index": choice.choice, "message": message, "logprobs": logprobs, "finish_reason": reason, "stop_reason": result.stop_reason}

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """The role of each choice, then one event a token; a call of a tool is one event."""
        options = self.body.stream_options
        with_usage = options is not None and options.include_usage
        head = self.head("chat.completion.chunk")
        chunk_head = head | ({"usage": None} if with_usage else {})
        skip = self.params.skip_special_tokens
        cutters = [TokenCutter(self.server.tokenizer, skip_special_tokens=skip) for _ in range(self.params.n)]
        parsers = [self._parser() for _ in range(self.params.n)]
        try:
            yield b"".join(
                event({**chunk_head, "choices": [chunk(index, {"role": "assistant", "content": ""})]}) for index in range(self.params.n))
            async for index, choice, delta in generation.deltas():
                pieces, parser = cutters[index].cut(delta), parsers[index]
                out = b""
                for i, piece in enumerate(pieces):
                    reason: str | None = delta.finish_reason if i == len(pieces) - 1 else None
                    logprobs = None
                    if delta.logprobs is not None and i < len(delta.logprobs):
                        logprobs = {"content": [chat_logprob(self.server.tokenizer, delta.logprobs[i], self.top)]}
                    changes = [{"content": piece}] if parser is None else tool_changes(parser, piece, last=reason is not None)
                    if reason == "stop" and parser is not None and parser.num_calls:
                        reason = "tool_calls"
                    stop_reason = choice.stop_reason if reason == "stop" else None
                    for change in changes[:-1]:
                        out += event({**chunk_head, "choices": [chunk(index, change)]})
                    out += event({**chunk_head, "choices": [chunk(index, changes[-1], logprobs, reason, stop_reason)]})
                yield out
            if with_usage:
                yield event({**head, "choices": [], "usage": generation.usage()})
            yield DONE
        except (MlsdcError, ApiError) as error:
            yield event((error if isinstance(error, ApiError) else api_error(error)).body())


def tool_changes(parser: ToolParser, piece: str, *, last: bool) -> list[dict[str, Any]]:
    """The `delta`s that a token's text makes, at least one."""
    first = parser.num_calls
    parts = parser.feed(piece) + (parser.finish() if last else [])
    changes: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, Call):
            changes.append({"tool_calls": [{"index": first, **part.to_json()}]})
            first += 1
        else:
            changes.append({"content": part})
    return changes or [{}]


def chunk(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, reason: str | None = None,
          stop_reason: int | str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason, "stop_reason": stop_reason}


def check_fields(body: ChatRequest) -> None:
    """Fields that contradict each other. Raises RequestError."""
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options: expected only where stream is true")
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs: expected only where logprobs is true")
    if body.max_tokens is not None and body.max_completion_tokens is not None and body.max_tokens != body.max_completion_tokens:
        raise RequestError("max_tokens: another number than max_completion_tokens, which is its newer name")
    if body.max_tokens == 0:
        raise RequestError("max_tokens: 0, expected at least 1")
    for name in ("tool_choice", "parallel_tool_calls"):
        if body.tools is None and getattr(body, name) not in (None, "none"):
            raise RequestError(f"{name}: expected only with tools")
    for name in body.chat_template_kwargs or ():
        if name in RESERVED:
            raise RequestError(f"chat_template_kwargs.{name}: set by the request itself")


def template_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates know them: text, and only the fields that were given. Raises RequestError."""
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
        if message.tool_calls:
            entry["tool_calls"] = [_call(call, f"messages[{i}].tool_calls[{j}]") for j, call in enumerate(message.tool_calls)]
        found.append(entry)
    return found


def _call(call: ToolCall, where: str) -> dict[str, Any]:
    """A call as templates want it: they write its arguments as JSON themselves."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise RequestError(f"{where}.function.arguments: expected a JSON object")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
