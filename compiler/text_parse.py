"""Parser of the IR's text form (`text`), line by line; every error has a line, a column and a caret. Grammar: docs/ir.md."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mlsdc.compiler.errors import IrError, MlsdcError
from mlsdc.compiler.graph import Graph, Input, Node, Weight
from mlsdc.compiler.module import LevelModule, Module
from mlsdc.compiler.op_attrs import AttrError, make_op
from mlsdc.compiler.ops import Mismatch
from mlsdc.compiler.text_line import Line
from mlsdc.compiler.types import Dim, DType, KvType, TensorType, TreeType, Type
from mlsdc.runtime.kv_format import KvGeometry
from mlsdc.runtime.manifest import Plan

RESERVED = frozenset((*(str(d) for d in DType), "true", "false", "inf", "nan"))  # what a dim cannot be called


def parse(text: str, where: str = "ir") -> Graph | Module:
    """A graph or a module from its text; `where` names it in errors. Raises IrError with line, column and a caret."""
    return Parser(text, where).parse()


def parse_graph(text: str, where: str = "ir") -> Graph:
    parsed = parse(text, where)
    if not isinstance(parsed, Graph):
        raise IrError(f"{where}: holds a module, expected a graph")
    return parsed


def parse_module(text: str, where: str = "ir") -> Module:
    parsed = parse(text, where)
    if not isinstance(parsed, Module):
        raise IrError(f"{where}: holds a graph, expected a module")
    return parsed


class Parser:
    """Line by line: every statement stands on a line of its own; blank lines and whole-line comments are skipped."""

    def __init__(self, text: str, where: str) -> None:
        raw = text.split("\n")
        lines = (Line(line, number, where) for number, line in enumerate(raw, 1))
        self.lines = [line for line in lines if line.at < len(line.text) and not line.text.startswith("//", line.at)]
        self.last = Line("", len(raw), where)
        self.next = 0

    def line(self) -> Line | None:
        """The current line, not consumed."""
        return self.lines[self.next] if self.next < len(self.lines) else None

    def parse(self) -> Graph | Module:
        first = self.line()
        if first is None:
            raise self.last.fail("expected 'graph' or 'module', found an empty text")
        result: Graph | Module
        if first.take("graph "):
            result = self.graph(self.header(first))
        elif first.take("module "):
            result = self.module(self.header(first))
        else:
            raise first.fail("expected 'graph NAME' or 'module NAME'")
        extra = self.line()
        if extra is not None:
            raise extra.fail("expected the end of the text")
        return result

    def header(self, line: Line) -> str:
        name = line.name("a name")
        line.end()
        self.next += 1
        return name

    def module(self, name: str) -> Module:
        levels: list[LevelModule] = []
        plan = None
        if (line := self.line()) is not None and line.take("plan "):
            plan = parse_plan(line)
            self.next += 1
        while (line := self.line()) is not None and line.take("level "):
            start = line.at
            level = self.level(line)
            if any(other.name == level.name for other in levels):
                raise line.fail(f"level '{level.name}' is defined twice", start)
            graphs: dict[str, Graph] = {}
            while (line := self.line()) is not None and line.take("program "):
                start = line.at
                program = line.name("a program name")
                if program in graphs:
                    raise line.fail(f"program '{program}' is defined twice", start)
                line.expect("=")
                line.expect("graph ")
                graphs[program] = self.graph(self.header(line))
            levels.append(LevelModule(level.name, level.kind, level.params, graphs, level.kv))
        return Module(name, tuple(levels), plan)

    def level(self, line: Line) -> LevelModule:
        name, kv, params = line.name("a level name"), None, {}
        line.expect("kind=")
        kind = line.name("a level kind")
        if line.take("params="):
            start = line.at
            params = line.json()
            if not isinstance(params, dict):
                raise line.fail("expected params as a JSON object", start)
        if line.take("kv="):
            start = line.at
            type_ = parse_type(line, {})
            if not isinstance(type_, KvType):
                raise line.fail("expected kv<format, page=, layers=, heads=, dim=>", start)
            kv = geometry(line, type_, start)
        line.end()
        self.next += 1
        return LevelModule(name, kind, params, {}, kv)

    def graph(self, name: str) -> Graph:
        dims: dict[str, Dim] = {}
        nodes: dict[str, Node] = {}
        if (line := self.line()) is not None and line.take("dims "):
            dims = self.dims(line)
        while (line := self.line()) is not None:
            if not line.text.startswith("%", line.at):
                break
            node = parse_node(line, dims, nodes)
            nodes[node.name] = node
            self.next += 1
        if line is None or not line.match(r"return\b"):
            raise (line or self.last).fail("expected '%name = op(...)' or 'return'")
        return Graph(name, tuple(nodes.values()), self.outputs(line, nodes))

    def dims(self, line: Line) -> dict[str, Dim]:
        dims: dict[str, Dim] = {}
        while True:
            start = line.at
            name = line.word("a dim's name")
            if name in RESERVED or name in dims:
                raise line.fail(f"'{name}' cannot name a dim" if name in RESERVED else f"dim '{name}' is declared twice", start)
            line.expect("in")
            low = line.integer("the lowest size")
            line.expect("..")
            dims[name] = Dim(name, low, line.integer("the highest size"))
            if not line.take(","):
                break
        line.end()
        self.next += 1
        return dims

    def outputs(self, line: Line, nodes: Mapping[str, Node]) -> tuple[tuple[str, str], ...]:
        outputs: list[tuple[str, str]] = []
        while line.at < len(line.text) and not line.text.startswith("//", line.at):
            if outputs:
                line.expect(",")
            result = line.name("a result's name")
            line.expect("=")
            outputs.append((result, parse_use(line, nodes)))
        self.next += 1
        return tuple(outputs)


def parse_node(line: Line, dims: Mapping[str, Dim], nodes: Mapping[str, Node]) -> Node:
    """`%name = op(%input, ..., attr=value, ...) : type // origin`; the type may be left out where the op infers it."""
    start = line.at
    line.expect("%")
    name = line.name("a value's name")
    if name in nodes:
        raise line.fail(f"%{name} is defined twice", start)
    line.expect("=")
    op_at = line.at
    opname = line.word("an op")
    line.expect("(")
    inputs: list[str] = []
    attrs: dict[str, Any] = {}
    places: dict[str, int] = {}
    while not line.take(")"):
        if inputs or attrs:
            line.expect(",")
        if line.text.startswith("%", line.at) and not attrs:
            inputs.append(parse_use(line, nodes))
            continue
        at = line.at
        key = line.word("an attribute or ')'")
        if key in attrs:
            raise line.fail(f"attribute '{key}' is given twice", at)
        line.expect("=")
        places[key] = at
        attrs[key] = parse_value(line, dims)
    try:
        op = make_op(opname, attrs)
    except AttrError as error:
        raise line.fail(str(error), places.get(error.attr, op_at)) from None
    given, type_at = None, line.at
    if line.take(":"):
        type_at = line.at
        given = parse_type(line, dims)
    if isinstance(op, Input | Weight):
        if given is None or inputs:
            raise line.fail(f"{opname} takes no inputs" if inputs else f"expected ': type', {opname} has none of its own", type_at)
        return Node(name, op, (), given, line.comment())
    try:
        type_ = op.infer(*(nodes[i].type for i in inputs))
    except Mismatch as error:
        raise line.fail(f"{opname} {error}", op_at) from None
    if given is not None and given != type_:
        raise line.fail(f"the type is {given}, but {opname} gives {type_}", type_at)
    return Node(name, op, tuple(inputs), type_, line.comment())


def parse_use(line: Line, nodes: Mapping[str, Node]) -> str:
    start = line.at
    line.expect("%")
    name = line.name("a value's name")
    if name not in nodes:
        raise line.fail(f"%{name} is not defined above", start)
    return name


def parse_value(line: Line, dims: Mapping[str, Dim]) -> Any:
    """int, float, bool, string, dtype, dim or a list of these (a tuple)."""
    if line.text.startswith('"', line.at):
        return line.string()
    if line.take("["):
        items: list[Any] = []
        while not line.take("]"):
            if items:
                line.expect(",")
            items.append(parse_value(line, dims))
        return tuple(items)
    number = line.match(r"-?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|(?:inf|nan)\b)")
    if number is not None:
        return int(number) if re.fullmatch(r"-?\d+", number) else float(number)
    start = line.at
    word = line.word("a value")
    if word in ("true", "false"):
        return word == "true"
    if word in dims:
        return dims[word]
    if word in RESERVED:
        return DType(word)
    raise line.fail(f"'{word}' is neither a dtype nor a declared dim", start)


def parse_type(line: Line, dims: Mapping[str, Dim]) -> Type:
    """`f32[rows, 576]`, `kv<bf16, page=32, layers=30, heads=3, dim=64>` or `tree`."""
    start = line.at
    word = line.word("a type")
    if word == "tree":
        return TreeType()
    if word == "kv":
        line.expect("<")
        format_ = line.name("a KV format")
        sizes = []
        for key in ("page", "layers", "heads", "dim"):
            line.expect(",")
            line.expect(f"{key}=")
            sizes.append(line.integer("a size"))
        line.expect(">")
        return KvType(format_, *sizes)
    try:
        dtype = DType(word)
    except ValueError:
        raise line.fail(f"'{word}' is not a type; dtypes are {', '.join(DType)}", start) from None
    line.expect("[")
    shape: list[int | Dim] = []
    while not line.take("]"):
        if shape:
            line.expect(",")
        at = line.at
        size = line.match(r"\d+|[A-Za-z_]\w*")
        if size is None or not (size.isdigit() or size in dims):
            raise line.fail(f"dim '{size}' is not declared" if size else "expected a size or ']'", at)
        shape.append(int(size) if size.isdigit() else dims[size])
    return TensorType(dtype, tuple(shape))


def parse_plan(line: Line) -> Plan:
    start = line.at
    try:
        plan = Plan(**line.json())
    except TypeError as error:
        raise line.fail(f"not a plan ({error})", start) from None
    line.end()
    return plan


def geometry(line: Line, type_: KvType, at: int) -> KvGeometry:
    try:
        return KvGeometry(type_.format, type_.page_size, type_.num_layers, type_.num_kv_heads, type_.head_dim)
    except MlsdcError as error:
        raise line.fail(str(error), at) from None
