"""What clients send: every field that is served, and none else. A field that is not here is refused by name, never ignored.

OpenAI's names and defaults where OpenAI has the field, vLLM's for the rest; `speculation`, `deadline_s` and `priority` are ours.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mlsdc.runtime.sampling_params import MAX_CHOICES, MAX_REPETITION, MAX_STOP_CHARS, MAX_TEMPERATURE, MAX_TOP_K
from mlsdc.runtime.server.errors import ApiError
from mlsdc.runtime.step import MAX_LOGPROBS

TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
B = TypeVar("B", bound="Body")


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool = False


class SpeculationOptions(Body):
    """How this request may be drafted. It changes the speed, never the text."""

    enabled: bool = True
    max_draft_tokens: Annotated[int, Field(ge=0)] | None = None
    levels: list[str] | None = None


class JsonSchema(Body):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, serialize_by_alias=True)

    name: Annotated[str, Field(min_length=1, max_length=64)]
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Body):
    """`json_object`: any JSON object. `json_schema`: JSON of that schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Generation(Body):
    """What both kinds of completion share."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOP_K)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=MAX_REPETITION)] | None = None
    logit_bias: dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    stop: StopString | list[StopString] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    speculation: SpeculationOptions | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    deadline_s: Annotated[float, Field(gt=0)] | None = None
    user: Annotated[str, Field(max_length=256)] | None = None  # goes to the log


class CompletionRequest(Generation):
    prompt: str | Annotated[list[str], Field(min_length=1)] | Annotated[list[TokenId], Field(min_length=1)] | Annotated[
        list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


class TextPart(Body):
    type: Literal["text"]
    text: str


class FunctionCall(Body):
    name: Annotated[str, Field(min_length=1, max_length=64)]
    arguments: str


class ToolCall(Body):
    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(Body):
    """One turn. Fields that an assistant's message comes with, but that are always null here, may be null."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None


class FunctionSpec(Body):
    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionSpec


class ToolName(Body):
    name: str


class ToolChoice(Body):
    type: Literal["function"]
    function: ToolName


class ChatRequest(Generation):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(min_length=1, max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(Body):
    """A text or a chat."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_generation_prompt: bool = True


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool = False


def parse(kind: type[B], body: bytes) -> B:
    """Raises ApiError 400 that names the first field at fault."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise refusal(error) from None
    except ValueError as error:  # bytes that are no Unicode
        raise ApiError(400, f"body: {error}") from None


def refusal(error: ValidationError) -> ApiError:
    """One line: the field, what was found, what was expected. Of a union's complaints, the one that got furthest."""
    first = max(error.errors(include_url=False, include_context=False), key=lambda e: (e["type"] == "extra_forbidden", len(e["loc"])))
    path = ""
    for part in first["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in ("str", "int", "ToolChoice") and part.replace("_", "").isalnum():  # pydantic names a union's members, too
            path += f".{part}" if path else part
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{path}: this server has no such field", param=path, code="unsupported_field")
    if first["type"] == "json_invalid":
        return ApiError(400, f"body: not JSON ({first['msg'].removeprefix('Invalid JSON: ')})")
    if first["type"] == "missing":
        return ApiError(400, f"{path}: missing", param=path)
    found = repr(first["input"])
    message = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return ApiError(400, f"{path or 'body'}: {found if len(found) <= 80 else found[:77] + '...'}, expected {message}", param=path or None)
