"""The text form of graphs and modules: what a person reads, what dumps hold, and what `mlsdc opt` parses back. Grammar: docs/ir.md.

    graph forward
    dims rows in 1..256

    %tokens  = input()                                        : i32[rows]
    %w.embed = weight(sources=["model.embed_tokens.weight"])  : q8[49152, 576]
    %embed   = embed(%tokens, %w.embed)                       : f32[rows, 576]    // model.embed_tokens

    return hidden=%embed

`parse(print_graph(g)) == g`, and the same for modules.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from typing import Any

from mlsdc.compiler.errors import IrError
from mlsdc.compiler.graph import Graph, Node
from mlsdc.compiler.module import LevelModule, Module
from mlsdc.compiler.text_line import BARE
from mlsdc.compiler.text_parse import RESERVED, parse, parse_graph, parse_module
from mlsdc.compiler.types import Dim, DType, KvType, TensorType

__all__ = ["graph_dims", "parse", "parse_graph", "parse_module", "print_graph", "print_module", "print_node"]

NAME_COLUMN, TYPE_COLUMN, ORIGIN_COLUMN = 32, 100, 120  # fixed, so that one long name does not move every other line of a diff


def print_graph(graph: Graph) -> str:
    """The graph as text. Raises IrError for dims that the header cannot declare."""
    return "\n".join([f"graph {quoted(graph.name)}", *body(graph)]) + "\n"


def print_module(module: Module) -> str:
    """The module with its cascade, cheapest level first, and every level's programs."""
    lines = [f"module {quoted(module.name)}"]
    if module.plan is not None:
        lines += ["", f"plan {json.dumps(dataclasses.asdict(module.plan), sort_keys=True)}"]
    for level in module.levels:
        lines += ["", level_line(level)]
        for program, graph in level.graphs.items():
            lines += ["", f"program {quoted(program)} = graph {quoted(graph.name)}", *body(graph)]
    return "\n".join(lines) + "\n"


def level_line(level: LevelModule) -> str:
    line = f"level {quoted(level.name)} kind={quoted(level.kind)}"
    if level.params:
        line += f" params={json.dumps(dict(level.params), sort_keys=True)}"
    if level.kv is not None:
        kv = level.kv
        line += f" kv={KvType(kv.format, kv.page_size, kv.num_layers, kv.num_kv_heads, kv.head_dim)}"
    return line


def body(graph: Graph) -> list[str]:
    dims = graph_dims(graph)
    lines = [f"dims {', '.join(f'{d.name} in {d.lo}..{d.hi}' for d in dims.values())}"] if dims else []
    lines += ["", *map(print_node, graph.nodes), ""]
    lines.append(f"return {', '.join(f'{quoted(result)}=%{quoted(name)}' for result, name in graph.outputs)}".rstrip())
    return lines


def print_node(node: Node) -> str:
    """One node on one line, in fixed columns."""
    arguments = [f"%{quoted(name)}" for name in node.inputs] + [f"{key}={print_value(value)}" for key, value in node.op.attrs().items()]
    line = f"%{quoted(node.name)}".ljust(NAME_COLUMN) + f" = {node.op.opname}({', '.join(arguments)})"
    line = line.ljust(TYPE_COLUMN) + f" : {node.type}"
    return line.ljust(ORIGIN_COLUMN) + f" // {print_origin(node.origin)}" if node.origin else line


def print_value(value: Any) -> str:
    if isinstance(value, DType | Dim):
        return str(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return f"[{', '.join(map(print_value, value))}]"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def print_origin(origin: str) -> str:
    plain = origin.isprintable() and origin == origin.strip() and not origin.startswith('"')
    return origin if plain else json.dumps(origin)


def quoted(name: str) -> str:
    return name if BARE.fullmatch(name) else json.dumps(name)


def graph_dims(graph: Graph) -> dict[str, Dim]:
    """The graph's symbolic dims by name, in order of first use. Raises IrError for two of one name, or a name that is taken."""
    dims: dict[str, Dim] = {}
    for node in graph:
        sizes = node.type.shape if isinstance(node.type, TensorType) else ()
        for dim in find_dims((*sizes, *node.op.attrs().values())):
            known = dims.setdefault(dim.name, dim)
            if known != dim:
                raise IrError(f"%{node.name}: dim '{dim.name}' is {dim.lo}..{dim.hi} here and {known.lo}..{known.hi} before")
            if dim.name in RESERVED or not re.fullmatch(r"[A-Za-z_]\w*", dim.name):
                raise IrError(f"%{node.name}: '{dim.name}' cannot name a dim")
    return dims


def find_dims(values: Iterable[Any]) -> Iterable[Dim]:
    for value in values:
        if isinstance(value, Dim):
            yield value
        elif isinstance(value, tuple):
            yield from find_dims(value)
