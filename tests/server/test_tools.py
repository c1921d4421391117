"""Tools and structured answers: calls come out whole however the text is cut, and a required one always comes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from byte_tokenizer import byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from rig import HI, serving

from mlsdc.runtime.errors import RequestError
from mlsdc.runtime.server.tools import HERMES, LLAMA3, MISTRAL, Call, ToolFormat, ToolParser, tool_format

pytest.importorskip("llguidance")

TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }} in <tool_call>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}<tool_call>{{ c['function'] | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_TOOLS = byte_tokenizer(chat_template=TEMPLATE)
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "weather", "description": "now", "parameters": {
    "type": "object", "additionalProperties": False, "required": ["city", "days"],
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}}}}}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
EOS = WITH_TOOLS.tokenizer.token_to_id("<|im_end|>")


def asked(settings: Any = None) -> Any:
    return serving(tokenizer=WITH_TOOLS, eos=(EOS,), settings=settings, max_model_len=900, num_pages=900, max_num_seqs=2)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_required_call_comes(choice: Any, stream: bool) -> None:
    async def main() -> None:
        async with asked() as rig:
            answer = await rig.openai.chat.completions.create(
                model="fake", messages=HI, tools=[WEATHER, CLOCK], tool_choice=choice, temperature=1, seed=3, max_tokens=250, stream=stream,
                parallel_tool_calls=False)
            if stream:
                deltas = [chunk.choices[0] async for chunk in answer]
                calls = [call for delta in deltas for call in delta.delta.tool_calls or []]
                reason = deltas[-1].finish_reason
                assert not "".join(delta.delta.content or "" for delta in deltas)
            else:
                calls, reason = answer.choices[0].message.tool_calls, answer.choices[0].finish_reason
                assert answer.choices[0].message.content is None
            (call,) = calls
            arguments = json.loads(call.function.arguments)
            assert reason == "tool_calls"
            if call.function.name == "weather":
                assert arguments["city"] in ("Paris", "Rome")
                assert 1 <= arguments["days"] <= 9
            else:
                assert choice == "required"
                assert arguments == {}

    asyncio.run(main())


def test_a_conversation_with_calls_goes_through_the_template() -> None:
    async def main() -> None:
        async with asked() as rig:
            history = [
                *HI, {"role": "assistant", "content": None, "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}]},
                {"role": "tool", "tool_call_id": "1", "content": "noon"}]
            answer = await rig.openai.chat.completions.create(model="fake", messages=history, tools=[CLOCK], max_tokens=3)
            assert answer.choices[0].finish_reason in ("length", "stop")
            history[1]["tool_calls"][0]["function"]["arguments"] = "[]"  # type: ignore[index]
            refused = await rig.http.post("/v1/chat/completions", json={"messages": history, "tools": [CLOCK]})
            assert refused.json()["error"]["param"] == "messages[1].tool_calls[0].function.arguments"

    asyncio.run(main())


@pytest.mark.parametrize(("fields", "message"), [
    ({"tools": [WEATHER, WEATHER]}, "tools: two of them"), ({"tool_choice": "auto"}, "tool_choice: expected only with tools"),
    ({"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name: 'x'"),
    ({"tools": [CLOCK], "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice: a call is asked for"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: expected with"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objekt"}}}}, "grammar: Invalid type"),
    ({"response_format": {"type": "xml"}}, "response_format.type: 'xml'"),
    ({"response_format": {"type": "json_object"}, "min_tokens": 4}, "min_tokens: 4, expected 0 with a grammar"),
])
def test_contradictions_are_refused(fields: dict[str, Any], message: str) -> None:
    async def main() -> None:
        async with asked() as rig:
            answer = await rig.http.post("/v1/chat/completions", json={"messages": HI, **fields})
            assert answer.status_code == 400
            assert answer.json()["error"]["message"].startswith(message)

    asyncio.run(main())


def test_a_model_without_tools_refuses_them() -> None:
    async def main() -> None:
        async with serving() as rig:
            answer = await rig.http.post("/v1/chat/completions", json={"messages": HI, "tools": [CLOCK]})
            assert answer.json()["error"]["message"] == "tools: this model's chat template has none"

    asyncio.run(main())


def test_an_answer_is_of_the_schema_and_the_same_with_and_without_speculation() -> None:
    schema = WEATHER["function"]["parameters"]

    async def main() -> None:
        async with asked() as rig:
            texts = set()
            for enabled in (True, False):
                answer = await rig.openai.chat.completions.create(
                    model="fake", messages=HI, temperature=1, seed=11, max_tokens=200,
                    response_format={"type": "json_schema", "json_schema": {"name": "w", "schema": schema}},
                    extra_body={"speculation": {"enabled": enabled}})
                texts.add(answer.choices[0].message.content)
                assert answer.choices[0].finish_reason == "stop"
            (text,) = texts
            assert json.loads(text or "")["city"] in ("Paris", "Rome")
            answer = await rig.openai.completions.create(
                model="fake", prompt="x", max_tokens=200, temperature=0, extra_body={"response_format": {"type": "json_object"}})
            assert answer.choices[0].text.startswith("{")

    asyncio.run(main())


CALL = '{"name": "f", "arguments": {"a": "<b>"}}'
ANSWERS = [
    (HERMES, f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>"),
    (HERMES, f"<tool_call>{CALL}</tool_call>\n<tool_call>\n{CALL}</tool_call>"),
    (HERMES, "a <tool_ca not one <tool_call>nothing</tool_call> b"), (HERMES, f"<tool_call>\n{CALL}"), (HERMES, "  plain < text  "),
    (HERMES, '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'), (HERMES, ""), (HERMES, "  \n"),
    (MISTRAL, f"[TOOL_CALLS] [{CALL}, {CALL}]"), (MISTRAL, "[TOOL"), (MISTRAL, "so [1] it is"),
    (LLAMA3, CALL.replace("arguments", "parameters")), (LLAMA3, "{not a call"), (LLAMA3, " words {}"),
]


def parsed(style: ToolFormat, pieces: list[str]) -> tuple[str, list[Call]]:
    parser = ToolParser(style, ["f"])
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
    return "".join(part for part in parts if isinstance(part, str)), [part for part in parts if isinstance(part, Call)]


@given(st.sampled_from(ANSWERS), st.lists(st.integers(0, 80), max_size=30))
def test_calls_do_not_depend_on_how_the_text_is_cut(answer: tuple[ToolFormat, str], cuts: list[int]) -> None:
    style, text = answer
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in zip(places, places[1:], strict=False)]
    assert parsed(style, pieces) == parsed(style, [text]) == parsed(style, list(text))


def test_calls_and_text_are_told_apart() -> None:
    whole = [Call("f", '{"a": "<b>"}')]
    found = [parsed(style, [text]) for style, text in ANSWERS]
    assert found[0] == ("Let me see.\n", whole)
    assert found[1] == ("", whole * 2)
    assert found[2] == (ANSWERS[2][1], [])
    assert found[3] == ("", whole)
    assert found[4] == ("  plain < text  ", [])
    assert found[5] == (ANSWERS[5][1], [])
    assert found[7] == ("  \n", [])
    assert found[8] == ("", whole * 2)
    assert [calls for _, calls in found[9:11]] == [[], []]
    assert found[11] == ("", whole)
    assert [text for text, _ in found[12:]] == ["{not a call", " words {}"]


def test_the_format_is_read_off_the_template() -> None:
    assert tool_format("{{ tools }} <tool_call>") is HERMES
    assert tool_format("[TOOL_CALLS] {{ tools }}") is MISTRAL
    assert tool_format('{{ tools }} {"name": x, "parameters": y}') is LLAMA3
    for template in (None, "no", "{{ tools }}"):
        with pytest.raises(RequestError, match="tools: this model's chat template has"):
            tool_format(template)
