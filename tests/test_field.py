"""docs/field.md names tests that exist, and every kind of fault once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "field.md").read_text()
ROWS = re.findall(r"^\| ([A-G]\d+) \| (.*) \|$", TEXT, re.MULTILINE)
NAMED = sorted(set(re.findall(r"([\w/]+\.py)::(\w+)", TEXT)))


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_named_test_exists(file: str, name: str) -> None:
    assert f"def test_{name}(" in (ROOT / "tests" / file).read_text()


def test_every_kind_stands_there_once_with_a_test_or_the_word_that_there_is_none() -> None:
    kinds = [kind for kind, _ in ROWS]
    assert len(kinds) == len(set(kinds)) == 78
    for kind, row in ROWS:
        assert "::" in row or "no test yet" in row, kind
