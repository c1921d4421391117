"""`mlsdc targets --compile`: every kernel of two models, for every architecture, weight and cache format, into the record of what fits."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from mlsdc.compiler.roofline_shapes import SHAPES, WEIGHTS, shape_graph
from mlsdc.passes.emit_program import emit_lowering, emit_program, merge_specs
from mlsdc.runtime.errors import MlsdcError
from mlsdc.runtime.kv_format import KvGeometry, parse_format
from mlsdc.runtime.step import Limits
from mlsdc.targets import make_target
from mlsdc.targets.hardware import Gpu
from mlsdc.targets.kernel_table import GPU_OF, TABLE, Line, read_table, source_digest, write_table
from mlsdc.targets.nvidia_build import build_one
from mlsdc.targets.protocol import KernelSpec
from mlsdc.targets.triton_build import render, reproducible

LIMITS = Limits(max_model_len=8192, max_num_seqs=16, max_num_batched_tokens=512, max_logit_rows=64, max_tree_nodes=31)
MODELS = {"smollm2-135m": 32, "llama-3-8b": 32}  # -> tokens of a page
ONE_MODEL = {86: ("smollm2-135m",), 120: ("smollm2-135m",)}  # architectures that the record has fewer models of
CACHES = ("bf16", "int8", "fp8", "int8n", "int4-token", "int4", "int3", "int2", "int8/int4-token", "int8/int4")
FAST = ("bf16", "int8", "int4")


def kernels(model: str, gpu: str, weights: Iterable[str] = WEIGHTS, caches: Iterable[str] = CACHES) -> tuple[KernelSpec, ...]:
    """Of a model's whole program: with each of the caches, with each kind of weights, and with drafted rows fast."""
    shape, page = SHAPES[model], MODELS[model]
    groups = []
    choices = [("int8", cache, True) for cache in caches] + [(kind, "bf16", True) for kind in weights]
    choices += [("int8", cache, False) for cache in FAST if cache in caches]
    for kind, cache, exact in choices:
        target = make_target(gpu, LIMITS, exact)
        program, specs = emit_program(shape_graph(shape, LIMITS, kind, cache, page), target, "forward", "target")
        sample, _ = target.sample(program.taps["logits"], shape.vocab, program.arena_bytes)
        commit = target.commit(KvGeometry(parse_format(cache)[0].name, page, shape.layers, shape.kv_heads, shape.head_dim))
        groups += [specs, emit_lowering(sample, "sample", "target")[1], emit_lowering(commit, "commit", "target")[1]]
    return merge_specs(groups)


def recorded(sm: int) -> tuple[str, ...]:
    """The models whose kernels for an architecture the record has."""
    return ONE_MODEL.get(sm, tuple(MODELS))


def compile_into_table(architectures: Iterable[int], models: Iterable[str] = (), path: Path = TABLE) -> Iterator[str]:
    """Of the models, by default those of `recorded`, compile what the table lacks or has another text of; yields a line for each kernel.
    Lines of other architectures stay.

    Raises CompileError for a kernel that spills or does not fit.
    """
    old = read_table(path) if path.exists() else []
    known = {(line.sm, line.model, line.kernel): line for line in old}
    for sm in architectures:
        if sm not in GPU_OF:
            raise MlsdcError(f"--compile: 'sm_{sm}' is no architecture that kernels are generated for; there are "
                             + ", ".join(f"sm_{sm}" for sm in sorted(GPU_OF)))
        for model in models or recorded(sm):
            wanted = kernels(model, GPU_OF[sm].name)
            for spec in wanted:
                text = source_digest(render(spec))
                at = (sm, model, spec.key)
                if at not in known or known[at].source != text:
                    known[at] = measured(sm, model, spec, text)
                    write_table(known.values(), path)
                    line = known[at]
                    yield f"sm_{sm} {model} {spec.key}: {line.registers} registers, {line.shared_bytes} bytes shared, {line.warps} warps"
            keys = {spec.key for spec in wanted}
            known = {at: line for at, line in known.items() if at[:2] != (sm, model) or line.kernel in keys}
            write_table(known.values(), path)


def measured(sm: int, model: str, spec: KernelSpec, text: str) -> Line:
    gpu: Gpu = GPU_OF[sm]
    with tempfile.TemporaryDirectory() as folder, reproducible(gpu):
        used = build_one(spec, gpu, Path(folder), Path(".")).resources
    numbers = (used[name] for name in ("registers", "shared_bytes", "threads", "num_stages", "tensor_ops", "stack_bytes"))
    return Line(sm, model, spec.template, spec.key, text, *numbers)
