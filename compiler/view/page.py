"""The page itself: template, style and script of this folder around the data, in one file that needs no network."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def render_page(data: Mapping[str, Any]) -> str:
    """One HTML document. The same data gives the same bytes."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, sort_keys=True, default=str)
    text = text.replace("<", "\\u003c")  # nothing in it can end the script element
    parts = {"TITLE": html.escape(f"{data['title']} · mlsdc"), "STYLE": asset("page.css"), "DATA": text,
             "SCRIPT": "".join(asset(name) for name in ("layout.js", "page.js"))}
    page = asset("page.html")
    for name, part in parts.items():
        head, mark, tail = page.partition(f"@@{name}@@")
        assert mark  # page.html has each mark once
        page = head + part + tail
    return page


def asset(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")
