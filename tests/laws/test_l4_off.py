"""Law L4: without drafts an artifact with a cascade does what an artifact without one does."""

from __future__ import annotations

from dataclasses import replace

from mlsdc.compiler.module import LevelModule, Module
from mlsdc.compiler.pipeline import run_pipeline
from mlsdc.passes import PassOptions, default_pipeline
from mlsdc.passes.emit_program import emit_program
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.program import ProgramSpec
from mlsdc.runtime.sampling_params import SamplingParams, Speculation
from mlsdc.runtime.step import Limits
from mlsdc.targets.cpu import CpuTarget
from mlsdc.targets.cpu_isa import ISAS
from tests.laws.rows import engine_over
from tests.passes.graphs import Llama, row_program

PROMPTS = [[5, 6, 7], [9] * 30, [1, 2] * 50]
OFF = Speculation(enabled=False)


def launches(tree_nodes: int, *levels: LevelModule) -> ProgramSpec:
    limits = Limits(max_model_len=400, max_num_seqs=4, max_num_batched_tokens=64, max_logit_rows=64, max_tree_nodes=tree_nodes)
    graph = row_program(replace(Llama(), mlp=128))
    module = Module("tiny", (*levels, LevelModule("target", "model", {}, {"forward": graph})))
    middle = default_pipeline(PassOptions(limits, kv_page_size=16))
    names = [pass_.name for pass_ in middle]
    module = run_pipeline(module, middle[names.index("raise-names") + 1 :])
    return emit_program(module.target.graphs["forward"], CpuTarget(ISAS["cpu-x86-64-v4"], limits), "forward", "target")[0]


def test_a_cascade_leaves_the_targets_launch_list_as_it_is() -> None:
    ngram = LevelModule("lookup", "ngram", {"max_nodes": 7, "order": 4, "width": 2, "min_probability": 0.1})
    assert launches(7, ngram).launches == launches(0).launches


def test_off_runs_the_forward_program_alone_one_row_a_token(tiny_engine: Engine) -> None:
    engine = engine_over(tiny_engine, tiny_engine.drafting.levels[0])
    engine.generate(PROMPTS, SamplingParams(max_tokens=1, speculation=OFF))  # prompts are cached from here on
    runs: list[tuple[str, list[int]]] = []
    for name, program in engine._memory.programs.items():
        run = program.run

        def counted(name: str = name, run: object = run) -> None:
            runs.append((name, engine._memory.buffers.header[:3].tolist()))
            run()  # type: ignore[operator]

        program.run = counted  # type: ignore[method-assign]
    try:
        results = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=12, ignore_eos=True, speculation=OFF))
    finally:
        for program in engine._memory.programs.values():
            del program.run
    assert runs == [("forward", [3, 1, 1]), *[("forward", [1, 1, 1])] * 11]
    assert results[0].statistics.drafted == 0


def test_off_owns_no_scratch_and_asks_no_drafter(tiny_engine: Engine) -> None:
    engine = engine_over(tiny_engine, tiny_engine.drafting.levels[0])
    request = engine.submit([1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True, speculation=OFF))
    while engine.step():
        assert not request.table.scratch
        assert request.drafter is None
    assert request.num_output == 5
