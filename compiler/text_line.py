"""One line of IR text being read, and errors that point into it."""

from __future__ import annotations

import json
import re
from typing import Any

from mlsdc.compiler.errors import IrError

BARE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-/]*")  # a name that needs no quotes


class Line:
    """One line being read. `fail` raises IrError with file, line, column and a caret."""

    def __init__(self, text: str, number: int, where: str) -> None:
        self.text, self.number, self.where = text, number, where
        self.at = 0
        self.skip()

    def fail(self, message: str, at: int | None = None) -> IrError:
        column = self.at if at is None else at
        shown = self.text.replace("\t", " ")
        return IrError(f"{self.where}:{self.number}:{column + 1}: {message}\n  {shown}\n  {' ' * column}^")

    def skip(self) -> None:
        while self.at < len(self.text) and self.text[self.at] in " \t":
            self.at += 1

    def match(self, pattern: str) -> str | None:
        found = re.compile(pattern).match(self.text, self.at)
        if found is None:
            return None
        self.at = found.end()
        self.skip()
        return found[0]

    def take(self, token: str) -> bool:
        if not self.text.startswith(token, self.at):
            return False
        self.at += len(token)
        self.skip()
        return True

    def expect(self, token: str) -> None:
        if not self.take(token):
            raise self.fail(f"expected '{token}'")

    def word(self, what: str) -> str:
        word = self.match(r"[A-Za-z_]\w*")
        if word is None:
            raise self.fail(f"expected {what}")
        return word

    def name(self, what: str) -> str:
        if self.text.startswith('"', self.at):
            return self.string()
        name = self.match(BARE.pattern)
        if name is None:
            raise self.fail(f"expected {what}")
        return name

    def integer(self, what: str) -> int:
        number = self.match(r"-?\d+")
        if number is None:
            raise self.fail(f"expected {what}")
        return int(number)

    def json(self) -> Any:
        try:
            value, self.at = json.JSONDecoder().raw_decode(self.text, self.at)
        except ValueError as error:
            raise self.fail(f"not a JSON value ({getattr(error, 'msg', error)})", getattr(error, "pos", None)) from None
        self.skip()
        return value

    def string(self) -> str:
        value = self.json()
        assert isinstance(value, str)  # it starts with a quote
        return value

    def end(self) -> None:
        """Nothing but a comment may follow."""
        if self.at < len(self.text) and not self.text.startswith("//", self.at):
            raise self.fail("expected the end of the line")

    def comment(self) -> str:
        """The trailing comment's text; strings that do not fit one are JSON."""
        self.end()
        text = self.text[self.at + 2 :].strip()
        if not text.startswith('"'):
            return text
        self.take("//")
        return self.string()
