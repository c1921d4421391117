"""Show a compile as one HTML page that opens offline: graphs after every pass, kernels, the cascade, the KV cache.

    mlsdc compile m.yaml -o m.mlsdc --dump-ir dump
    mlsdc view dump m.mlsdc -o page.html          # the slider over the passes, and the kernels behind each node
    mlsdc view m.mlsdc trace.json -o page.html    # with what `mlsdc trace` measured
    mlsdc view dump/07-rowify.ir --onnx m.onnx    # one graph for Netron; weights are inputs
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", metavar="PATH", type=Path, help="a folder of --dump-ir, an artifact, a .ir file, a trace")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: the first path's name with .html")
    parser.add_argument("--onnx", type=Path, metavar="FILE", help="write the one .ir file's graph as ONNX instead of a page")


def main(args: argparse.Namespace) -> int:
    from mlsdc.compiler.view.data import page_data
    from mlsdc.compiler.view.page import render_page
    from mlsdc.runtime.errors import MlsdcError

    if args.onnx is not None:
        return write_onnx(args.paths, args.onnx)
    page = render_page(page_data(args.paths))
    output = args.output or Path(args.paths[0].resolve().with_suffix(".html").name)
    try:
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise MlsdcError(f"{output}: cannot be written ({error.strerror})") from None
    print(f"{output}  {len(page.encode()) / 1e6:.1f} MB")
    return 0


def write_onnx(paths: list[Path], output: Path) -> int:
    from mlsdc.compiler.graph import Graph
    from mlsdc.compiler.onnx.export import export_onnx
    from mlsdc.compiler.text import parse
    from mlsdc.runtime.errors import MlsdcError

    if len(paths) != 1 or paths[0].suffix != ".ir":
        raise MlsdcError("--onnx: takes one .ir file, as `mlsdc compile --dump-ir` writes them")
    try:
        parsed = parse(paths[0].read_text(encoding="utf-8"), str(paths[0]))
    except OSError as error:
        raise MlsdcError(f"{paths[0]}: cannot be read ({error.strerror})") from None
    graph = parsed if isinstance(parsed, Graph) else parsed.target.graphs["forward"]
    export_onnx(graph, output)
    print(f"{output}: {len(graph)} nodes")
    return 0
