"""Rendering: a template and its frozen parameters give a readable source file.

A name that the parameters lack is an error, never an empty string.
"""

from __future__ import annotations

from functools import cache

import jinja2


@cache
def environment() -> jinja2.Environment:
    loader = jinja2.FunctionLoader(_source)
    strict = jinja2.StrictUndefined
    return jinja2.Environment(loader=loader, undefined=strict, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)


def _source(name: str) -> str | None:
    """Templates are found by folder: `tir/linear_q.py.jinja`; fragments import each other by their bare name."""
    from importlib.resources import files

    root = files("mlsdc.templates")
    for path in (root.joinpath(*name.split("/")), *(root.joinpath(folder, name) for folder in ("tir", "llvm"))):
        if path.is_file():
            return path.read_text(encoding="utf-8")
    return None


def render(template: str, **context: object) -> str:
    """The template's text for the context, without runs of blank lines."""
    text = environment().get_template(template).render(**context)
    return "\n".join(line for line in text.split("\n") if line.strip() or not template.endswith(".py.jinja")) + "\n"
