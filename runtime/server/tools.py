"""Tool calls: how a model's template has them written, the grammar that makes one certain, and a parser of text that comes in pieces.

The format is read off the chat template: Hermes (`<tool_call>{"name", "arguments"}</tool_call>`: Qwen, SmolLM3 and others), Mistral
(`[TOOL_CALLS] [{...}]`), Llama 3 (`{"name", "parameters"}` as the whole answer).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlsdc.runtime.errors import RequestError
from mlsdc.runtime.grammar import JSON_OPTIONS
from mlsdc.runtime.sampling_params import Grammar
from mlsdc.runtime.server.requests import Tool, ToolChoice

NEWLINE = r'"\n"'


@dataclass(frozen=True)
class ToolFormat:
    """`begin` None: a call is the whole answer. `end` "": calls go on to the end of the answer."""

    name: str
    begin: str | None
    end: str
    arguments: str  # the key of a call's arguments

    def grammar(self, tools: Sequence[Tool], parallel: bool) -> Grammar:
        """Answers that are nothing but calls of these tools."""
        call = {"x-guidance": JSON_OPTIONS, "anyOf": [self._schema(tool) for tool in tools]}
        if self.begin is None:
            rules = ["start: call"]
        elif self.end:
            more = r' ("\n" one)*' if parallel else ""
            rules = [f"start: one{more}", f"one: {json.dumps(self.begin)} {NEWLINE} call {NEWLINE} {json.dumps(self.end)}"]
        else:
            more = ' (", " call)*' if parallel else ""
            rules = [f'start: {json.dumps(self.begin + " [")} call{more} "]"']
        return Grammar("lark", "\n".join([*rules, f"call: %json {json.dumps(call)}", ""]))

    def _schema(self, tool: Tool) -> dict[str, Any]:
        parameters = tool.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object", "additionalProperties": False, "required": ["name", self.arguments],
                "properties": {"name": {"const": tool.function.name}, self.arguments: parameters}}


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", "arguments")
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", "", "arguments")
LLAMA3 = ToolFormat("llama3", None, "", "parameters")


def tool_format(template: str | None) -> ToolFormat:
    """Raises RequestError where the model's template has no tools, or none known here."""
    if template is None or "tools" not in template:
        raise RequestError("tools: this model's chat template has none")
    for found in (HERMES, MISTRAL):
        if found.begin and found.begin in template:
            return found
    if '"parameters"' in template:
        return LLAMA3
    raise RequestError("tools: this model's chat template has them in a form that is not known here")


def chosen(tools: Sequence[Tool], choice: str | ToolChoice | None) -> Sequence[Tool] | None:
    """The tools of which one must be called; None if none must. Raises RequestError."""
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise RequestError("tools: two of them have one name")
    if isinstance(choice, ToolChoice):
        if choice.function.name not in names:
            raise RequestError(f"tool_choice.function.name: '{choice.function.name}' is not among tools")
        return [tool for tool in tools if tool.function.name == choice.function.name]
    return tools if choice == "required" else None


@dataclass(frozen=True)
class Call:
    """One call of a tool; `arguments` is JSON text."""

    name: str
    arguments: str

    def to_json(self) -> dict[str, Any]:
        return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ToolParser:
    """Splits an answer into text and calls. The same pieces come out however the text is cut going in; what is no call stays text."""

    def __init__(self, style: ToolFormat, names: Sequence[str], *, parallel: bool = True) -> None:
        self.style = style
        self.names = frozenset(names)
        self.parallel = parallel
        self.num_calls = 0
        self._held = ""  # text that is not yet known to be one or the other
        self._inside = False
        self._shown = False  # any text but blanks

    def feed(self, text: str) -> list[str | Call]:
        """Texts and calls that have become certain."""
        self._held += text
        out: list[str | Call] = []
        if self.style.begin is None:
            head = self._held.lstrip()
            if self._shown or (head and not head.startswith("{")):
                self._show(out, self._take(len(self._held)))
            return out
        while True:
            mark = self.style.end if self._inside else self.style.begin
            at = self._held.find(mark) if mark else -1
            if at < 0:
                break
            if self._inside:
                self._add_calls(out, self._take(at), self._take(len(mark)))
            else:
                before = self._take(at)
                if self._shown or before.strip():
                    self._show(out, before)
                self._take(len(mark))
            self._inside = not self._inside
        if not self._inside:
            keep = next((n for n in range(min(len(self._held), len(self.style.begin) - 1), 0, -1)
                         if self._held.endswith(self.style.begin[:n])), 0)
            blanks = len(self._held) - keep - len(self._held[: len(self._held) - keep].rstrip())  # around calls they are nothing
            self._show(out, self._take(len(self._held) - keep - blanks))
        return out

    def finish(self) -> list[str | Call]:
        """The rest, at the end of the answer."""
        out: list[str | Call] = []
        rest, self._held = self._held, ""
        if self._inside or (self.style.begin is None and rest.lstrip().startswith("{")):
            self._add_calls(out, rest, "")
        elif rest.strip() or not self.num_calls:
            self._show(out, rest)
        self._inside = False
        return out

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken

    def _show(self, out: list[str | Call], text: str) -> None:
        if text:
            self._shown = self._shown or bool(text.strip())
            out.append(text)

    def _add_calls(self, out: list[str | Call], text: str, end: str) -> None:
        calls = self._parse(text)
        if calls is None:
            self._show(out, (self.style.begin or "") + text + end)
            return
        for call in calls if self.parallel else calls[: 1 - min(1, self.num_calls)]:
            out.append(call)
            self.num_calls += 1

    def _parse(self, text: str) -> list[Call] | None:
        """The calls in a piece of JSON, None if it holds anything else."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return None
        calls = []
        for entry in found if isinstance(found, list) else [found]:
            arguments = entry.get(self.style.arguments) if isinstance(entry, dict) else None
            if not isinstance(arguments, dict) or entry.get("name") not in self.names:
                return None
            calls.append(Call(entry["name"], json.dumps(arguments, ensure_ascii=False)))
        return calls or None
