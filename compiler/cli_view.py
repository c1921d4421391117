"""Show a compile as one HTML page that opens offline: graphs after every pass, kernels, the cascade, the KV cache.

    mlsdc compile m.yaml -o m.mlsdc --dump-ir dump
    mlsdc view dump m.mlsdc -o page.html          # the slider over the passes, and the kernels behind each node
    mlsdc view m.mlsdc trace.json -o page.html    # with what `mlsdc trace` measured
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", metavar="PATH", type=Path, help="a folder of --dump-ir, an artifact, a .ir file, a trace")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: the first path's name with .html")


def main(args: argparse.Namespace) -> int:
    from mlsdc.compiler.view.data import page_data
    from mlsdc.compiler.view.page import render_page
    from mlsdc.runtime.errors import MlsdcError

    page = render_page(page_data(args.paths))
    output = args.output or Path(args.paths[0].resolve().with_suffix(".html").name)
    try:
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise MlsdcError(f"{output}: cannot be written ({error.strerror})") from None
    print(f"{output}  {len(page.encode()) / 1e6:.1f} MB")
    return 0
