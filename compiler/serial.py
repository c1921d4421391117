"""The JSON form of graphs and modules, for machines: deterministic (same value, same bytes), read back without loss.

Types stand as their text form; of attributes, dtypes are {"dtype": "f32"}, dims {"dim": "rows"}, tuples lists.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from mlsdc.compiler.errors import IrError, MlsdcError
from mlsdc.compiler.graph import Graph, Node
from mlsdc.compiler.module import LevelModule, Module
from mlsdc.compiler.op_attrs import make_op
from mlsdc.compiler.text import graph_dims
from mlsdc.compiler.text_line import Line
from mlsdc.compiler.text_parse import parse_type
from mlsdc.compiler.types import Dim, DType, Type
from mlsdc.runtime.kv_format import KvGeometry
from mlsdc.runtime.manifest import Plan

FORMAT = 1


def graph_to_json(graph: Graph) -> str:
    return dump({"format": FORMAT, "graph": encode_graph(graph)})


def module_to_json(module: Module) -> str:
    return dump({"format": FORMAT, "module": encode_module(module)})


def from_json(text: str, where: str = "json") -> Graph | Module:
    """Raises IrError, naming `where`, for anything that is not a verified graph or module."""
    try:
        raw = json.loads(text)
        if raw["format"] != FORMAT:
            raise IrError(f"{where}: format {raw['format']}, expected {FORMAT}")
        result = decode_graph(raw["graph"]) if "graph" in raw else decode_module(raw["module"])
        result.verify()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise IrError(f"{where}: not a graph or module ({type(error).__name__}: {error})") from None
    except MlsdcError as error:
        raise IrError(str(error) if str(error).startswith(where) else f"{where}: {error}") from None
    return result


def dump(raw: Any) -> str:
    return json.dumps(raw, indent=1, sort_keys=True) + "\n"


def encode_graph(graph: Graph) -> dict[str, Any]:
    return {
        "name": graph.name,
        "dims": {dim.name: [dim.lo, dim.hi] for dim in graph_dims(graph).values()},
        "nodes": [encode_node(node) for node in graph],
        "outputs": [list(output) for output in graph.outputs],
    }


def encode_node(node: Node) -> dict[str, Any]:
    attrs = {key: encode_value(value) for key, value in node.op.attrs().items()}
    return {
        "name": node.name,
        "op": node.op.opname,
        "attrs": attrs,
        "inputs": list(node.inputs),
        "type": str(node.type),
        "origin": node.origin,
    }


def encode_value(value: Any) -> Any:
    if isinstance(value, DType):
        return {"dtype": value.value}
    if isinstance(value, Dim):
        return {"dim": value.name}
    return [encode_value(item) for item in value] if isinstance(value, tuple) else value


def encode_module(module: Module) -> dict[str, Any]:
    plan = None if module.plan is None else dataclasses.asdict(module.plan)
    return {"name": module.name, "plan": plan, "levels": [encode_level(level) for level in module.levels]}


def encode_level(level: LevelModule) -> dict[str, Any]:
    kv = level.kv
    return {
        "name": level.name,
        "kind": level.kind,
        "params": dict(level.params),
        "kv": None if kv is None else [kv.format, kv.page_size, kv.num_layers, kv.num_kv_heads, kv.head_dim],
        "programs": [[program, encode_graph(graph)] for program, graph in level.graphs.items()],
    }


def decode_graph(raw: Any) -> Graph:
    dims = {name: Dim(name, low, high) for name, (low, high) in raw["dims"].items()}
    nodes = tuple(decode_node(node, dims) for node in raw["nodes"])
    return Graph(raw["name"], nodes, tuple((result, name) for result, name in raw["outputs"]))


def decode_node(raw: Any, dims: dict[str, Dim]) -> Node:
    try:
        op = make_op(raw["op"], {key: decode_value(value, dims) for key, value in raw["attrs"].items()})
    except IrError as error:
        raise IrError(f"%{raw['name']}: {error}") from None
    return Node(raw["name"], op, tuple(raw["inputs"]), decode_type(raw["type"], dims), raw["origin"])


def decode_type(text: str, dims: dict[str, Dim]) -> Type:
    line = Line(text, 1, "type")
    type_ = parse_type(line, dims)
    line.end()
    return type_


def decode_value(raw: Any, dims: dict[str, Dim]) -> Any:
    if isinstance(raw, list):
        return tuple(decode_value(item, dims) for item in raw)
    if isinstance(raw, dict):
        return DType(raw["dtype"]) if "dtype" in raw else dims[raw["dim"]]
    return raw


def decode_module(raw: Any) -> Module:
    plan = None if raw["plan"] is None else Plan(**raw["plan"])
    return Module(raw["name"], tuple(decode_level(level) for level in raw["levels"]), plan)


def decode_level(raw: Any) -> LevelModule:
    kv = None if raw["kv"] is None else KvGeometry(*raw["kv"])
    return LevelModule(raw["name"], raw["kind"], raw["params"], {name: decode_graph(graph) for name, graph in raw["programs"]}, kv)
