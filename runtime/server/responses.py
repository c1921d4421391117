"""What the server answers, as models: for the OpenAPI document, and for tests that hold the answers to it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Problem(Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(Answer):
    error: Problem


class Position(Answer):
    offered: int
    accepted: int


class LevelUsage(Answer):
    drafted: int
    accepted: int
    acceptance_rate: float
    per_position: list[Position]


class SpeculationUsage(Answer):
    """Rate = accepted / drafted, without bonus tokens; length = tokens a target step, with them."""

    steps: int
    drafted: int
    accepted: int
    acceptance_rate: float
    acceptance_length: float
    levels: dict[str, LevelUsage]


class PromptDetails(Answer):
    cached_tokens: int


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    speculation: SpeculationUsage


class TextLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Answer):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length", "abort"] | None
    stop_reason: int | str | None


class CompletionResponse(Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage


class TopLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    content: list[TokenLogprob]


class CalledFunction(Answer):
    name: str
    arguments: str


class AnswerToolCall(Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Answer):
    role: Literal["assistant"]
    content: str | None
    tool_calls: list[AnswerToolCall] | None = None


class ChatChoice(Answer):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "abort", "tool_calls"] | None
    stop_reason: int | str | None


class ChatResponse(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class Model(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    levels: list[str]


class ModelList(Answer):
    object: Literal["list"]
    data: list[Model]


class Tokens(Answer):
    tokens: list[int]
    count: int
    max_model_len: int


class Text(Answer):
    prompt: str


class Health(Answer):
    status: Literal["ok", "ready"]


class Version(Answer):
    version: str
    model: str
    fingerprint: str


