"""The whole compile: model.yaml -> checkpoint -> graph -> passes -> programs and kernels -> packed weights -> one folder."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlsdc.compiler import config_record
from mlsdc.compiler.calibrate import calibration
from mlsdc.compiler.capture import ModelSource, WeightSource, load_source
from mlsdc.compiler.check_tokenizer import check_tokenizer
from mlsdc.compiler.config import Config, load_config, parse_config
from mlsdc.compiler.config_levels import HeadsConfig, ModelConfig, SelfConfig
from mlsdc.compiler.counts_file import counts_files, counts_name
from mlsdc.compiler.decoder_levels import check_layers, model_level, open_exit, self_level
from mlsdc.compiler.errors import CompileError
from mlsdc.compiler.graph import Graph, Node
from mlsdc.compiler.heads.checkpoint import HeadFile
from mlsdc.compiler.heads.levels import LevelParts, head_level, open_level_files, shared_weights
from mlsdc.compiler.kv_scales import kv_facts
from mlsdc.compiler.module import LevelModule, Module
from mlsdc.compiler.observers import DumpObserver, ExplainObserver, ValidateObserver
from mlsdc.compiler.pack import WeightFile, check_output, check_space, hash_files, staged, write_bytes, write_text, write_weights
from mlsdc.compiler.pipeline import Pass, run_pipeline
from mlsdc.compiler.progress import PassProgress, Progress, Silent
from mlsdc.compiler.quality_gate import check_quality
from mlsdc.compiler.text import print_graph
from mlsdc.compiler.weight_origin import origins
from mlsdc.compiler.weights import read_weight
from mlsdc.passes import PassOptions, default_pipeline
from mlsdc.passes.emit_program import emit_ahead, emit_lowering, emit_program, emit_trees, merge_specs
from mlsdc.passes.shard import Shard, is_split, of_rank
from mlsdc.runtime.artifact import rank_file
from mlsdc.runtime.device.binding import input_widths
from mlsdc.runtime.errors import CapacityError
from mlsdc.runtime.kv_window import window_of
from mlsdc.runtime.levels.grown import AHEAD, PROGRAM
from mlsdc.runtime.manifest import LevelInfo, Manifest, ModelInfo, Plan
from mlsdc.runtime.memory_plan import LevelNeed, MemoryPlan, plan_memory
from mlsdc.runtime.program import ProgramSpec
from mlsdc.runtime.step import Limits
from mlsdc.targets import ALIASES, TARGETS, make_target, target_names
from mlsdc.targets.kv_support import refused_geometry

if TYPE_CHECKING:
    from mlsdc.compiler.capture.torch_export import Captured
    from mlsdc.targets.protocol import KernelSpec, Target

BUILD_BYTES = 64 * 2**20  # more than kernels, their sources and what the linker needs
TOOLS = ("mlsdc", "apache-tvm", "torch", "transformers")


def compile_model(config: Config | Mapping[str, Any] | Path | str, output: Path | str, *, set: Sequence[str] = (),
                  dump_ir: Path | str | None = None, verify_each: bool = False, progress: Progress | None = None) -> Path:
    """Compile a model.yaml (or the same as a mapping) into the artifact folder `output`, and return its path.

    `set` are overrides, `limits.max_num_seqs=16`. `dump_ir` is a folder for the graphs after every pass. With `verify_each` every pass's
    result is executed and compared. On any error, Ctrl-C included, `output` stays what it was. Raises MlsdcError, one line.
    """
    output, progress = Path(output), progress or Silent()
    config = read_config(config, set)
    check_output(output)
    source = load_source(config.target.model, config.folder)
    check_tokenizer(source)
    check_layers(config, "target", config.target.kv, source)
    limits = config.resolve_limits(int(source.config["max_position_embeddings"]))
    counts = counts_files(config, source)
    heads = open_level_files(config, source)
    exits = {level.name: open_exit(config, path, level, source) for path, level in config.drafters() if isinstance(level, SelfConfig)}
    targets = choose_targets(config, limits)
    check_ranks(config, targets, verify_each)
    options = pass_options(config, limits, source.vocab_size)
    default_pipeline(options)  # a pass that does not exist is found out before minutes of work

    progress.stage("capture")
    from mlsdc.compiler.capture.torch_export import capture_model

    captured = capture_model(source, max_tokens=limits.max_model_len)
    parts = level_parts(config, source, {**heads, **exits}, captured, limits)
    module = make_module(config, source, captured.graph, parts)

    progress.stage("passes")
    norms = kv_facts(source, model_folder(config), config.target.kv.format)
    passes = default_pipeline(replace(options, calibration=calibration(source, captured.weights), kv_norms=norms))
    explain = ExplainObserver()
    observers = [PassProgress(progress, len(passes)), explain, *([DumpObserver(dump_ir)] if dump_ir else []),
                 *([ValidateObserver()] if verify_each else [])]
    module = share_weights(run_pipeline(module, passes, observers))
    for line in module.target.params.get("kv_outliers", ()):
        logging.getLogger("mlsdc").warning("mlsdc: warning: kv cache: %s", line)
    if module.target.kv is None:
        raise CompileError("the target level has no paged KV cache: `insert-paged-kv` is disabled, or found no attention")

    check_support(config, module, targets)

    with staged(output) as folder:
        progress.stage("kernels")
        emitted = [emit(module, target, source.vocab_size) for target in targets]
        kinds = {target.family: target for target in reversed(targets)}  # the first target of each family
        packed = sum(target.packed_bytes(w.type) for target in kinds.values() for level in module.levels for w in weight_nodes(level))
        memory = [plan_level_memory(config, module, limits, target, programs, source.vocab_size, counts)
                  for target, (programs, _) in zip(targets, emitted, strict=True)]
        check_space(folder.parent, packed + BUILD_BYTES * len(targets))
        check_space(Path(tempfile.gettempdir()), BUILD_BYTES)
        built = tuple(replace(target.build(kernels, folder), exact=target.exact)
                      for target, (_, kernels) in zip(targets, emitted, strict=True))
        files = {target.name: write_programs(folder, target.name, programs) for target, (programs, _) in zip(targets, emitted, strict=True)}
        progress.stage("weights")
        filled = [level for level in module.levels if level.graphs]
        sources = {name: part.weights or captured.weights for name, part in parts.items()}
        weights = {level.name: pack_weights(folder, level, targets[0], sources.get(level.name, captured.weights), progress)
                   for level in filled}
        others = {rank_file(weights_path(level.name), rank): pack_weights(
                      folder, of_rank(level, rank), targets[0], sources.get(level.name, captured.weights), progress, rank)
                  for level in filled if is_split(level) for rank in range(1, config.tensor_parallel)}
        own = {(level.name, kind): pack_weights(
                   folder, level, target, sources.get(level.name, captured.weights), progress, lead=targets[0])
               for level in filled for kind, target in kinds.items() if own_nodes(level, target, targets[0])}
        every = {weights_path(name): file for name, file in weights.items()} | others
        every |= {weights_path(*key): file for key, file in own.items()}
        for level in module.levels:
            if level.graphs:
                write_text(folder, f"graph/{level.name}.ir", "\n".join(print_graph(graph) for graph in level.graphs.values()))
        packing = origins(weight_nodes(module.target), captured.weights)
        facts = {"passes": explain.passes, "weights": packing}
        write_text(folder, "explain.json", json.dumps(facts, indent=1, sort_keys=True, default=str) + "\n")
        write_text(folder, config_record.NAME, config_record.config_json(config, source.label))
        for name, data in {**counts, **{name: data for part in parts.values() for name, data in part.files.items()}}.items():
            write_bytes(folder, name, data)
        write_text(folder, "tokenizer.json", source.tokenizer_json)
        if source.chat_template:
            write_text(folder, "chat_template.jinja", source.chat_template)
        manifest = Manifest(
            model=model_info(config, source),
            limits=limits,
            levels=tuple(
                LevelInfo(level.name, level.kind, level_params(config, module, level, memory), level.kv,
                          weights_path(level.name) if level.graphs else None,
                          {target: of_level[level.name] for target, of_level in files.items()} if level.graphs else {},
                          {t.name: weights_path(level.name, t.family) for t in targets if (level.name, t.family) in own})
                for level in module.levels),
            targets=built,
            plan=module.plan or Plan(0, 0),
            files=hash_files(folder, leave_out=frozenset(every)),
            weights={path: (file.num_bytes, file.sha256) for path, file in every.items()},
            weight_headers={path: file.header_sha256 for path, file in every.items()},
            tools={name: version(name) for name in TOOLS},
            world_size=config.tensor_parallel,
        )
        write_text(folder, "manifest.json", manifest.to_json())
        check_quality(config, folder, compile_model, progress)
    return output


def all_passes() -> tuple[Pass, ...]:
    """The default pipeline, for those who list passes or run one by name."""
    return default_pipeline(PassOptions())


def read_config(config: Config | Mapping[str, Any] | Path | str, overrides: Sequence[str]) -> Config:
    if isinstance(config, Config):
        if overrides:
            raise TypeError("`set` changes a file or a mapping; a Config is changed with dataclasses.replace")
        return config
    return parse_config(config, overrides=overrides) if isinstance(config, Mapping) else load_config(config, overrides)


def choose_targets(config: Config, limits: Limits) -> tuple[Target, ...]:
    """The targets of `hardware`, the best first. Raises ConfigError, CompileError."""
    able = [name for name, entry in TARGETS.items() if entry.artifact]
    for name in config.hardware.split(","):
        entry = TARGETS.get(ALIASES.get(name, name))
        if entry is None:
            config.fail("hardware", f"'{name}' is not a target; targets are {', '.join(TARGETS)}")
        if not entry.artifact:
            config.fail("hardware", f"'{name}' has no kernels for a whole model yet ({entry.summary}); {', '.join(able)} have")
    targets = tuple(make_target(name, limits, config.target.exact) for name in target_names(config.hardware))
    if config.kernels.variants:
        for target in targets:
            target.ship_variants()
    if config.kernels.attention != "triton":
        for target in targets:
            if why := target.choose_attention(config.kernels.attention):
                config.fail("kernels.attention", f"{config.kernels.attention}: {why}")
    if config.kernels.linear != "plain":
        for target in targets:
            if why := target.choose_linear(config.kernels.linear):
                config.fail("kernels.linear", f"{config.kernels.linear}: {why}")
    return targets


def model_folder(config: Config) -> Path | None:
    """Where the model's files lie, if it is a folder."""
    folder = config.folder / Path(config.target.model).expanduser()
    return folder if folder.is_dir() else None


def pass_options(config: Config, limits: Limits, vocab_size: int) -> PassOptions:
    return PassOptions(
        limits=limits,
        vocab_size=vocab_size,
        weights=config.target.weights,
        kv_format=config.target.kv.format,
        kv_page_size=config.target.kv.page_size,
        tensor_parallel=config.tensor_parallel,
        disable=config.passes.disable,
    )


def make_module(config: Config, source: ModelSource, graph: Graph, parts: Mapping[str, LevelParts]) -> Module:
    """The cascade of the config over the captured graph: one module."""
    levels = []
    for i, (path, level) in enumerate(config.drafters()):
        part = parts.get(level.name, LevelParts())
        merged = merge_params(config, path) if ".merge[" in path else {}
        levels.append(LevelModule(level.name, level.kind, {**level.params(), **part.params} | counts_name(level, i) | merged, part.graphs))
    target = LevelModule("target", "model", config.target.kv.params(), {"forward": graph})
    return Module(config.target.name or source.name, (*levels, target))


def merge_params(config: Config, path: str) -> dict[str, Any]:
    """What a merged level says of the merge: the most nodes of its tree, and who verifies it."""
    at = int(path.removeprefix("cascade[").partition("]")[0])
    item, after = config.cascade[at], config.cascade[at + 1] if at + 1 < len(config.cascade) else None
    return {"merge_nodes": item.max_nodes, "verified_by": "target" if after is None else getattr(after, "name", "target")}


def level_parts(config: Config, source: ModelSource, files: Mapping[str, HeadFile | None], target: Captured, limits: Limits
                ) -> dict[str, LevelParts]:
    """Programs and more of the levels that have some, by name."""
    parts = {}
    for path, level in config.drafters():
        file = files.get(level.name)
        if isinstance(level, HeadsConfig) and file is not None:
            parts[level.name] = head_level(file, level, target.graph, target.weights, limits)
        elif isinstance(level, SelfConfig):
            parts[level.name] = self_level(level, file, target.graph, target.weights)
        elif isinstance(level, ModelConfig):
            parts[level.name] = model_level(config, path, level, source, limits)
    return parts


def share_weights(module: Module) -> Module:
    """Weights that a level reads from the target's file need not be packed again: its param `shared` says which."""
    levels = []
    for level in module.levels[:-1]:
        shared = shared_weights(level, module.target)
        levels.append(replace(level, params={**level.params, "shared": shared}) if shared else level)
    return replace(module, levels=(*levels, module.target))


def check_support(config: Config, module: Module, targets: Sequence[Target]) -> None:
    """Raises ConfigError for a cache format that a target cannot run."""
    for target in targets:
        for level in module.levels:
            if level.kv is not None and (why := refused_geometry(target.name, level.kv)):
                config.fail("target.kv" if level is module.target else f"cascade: level {level.name}", f"{target.name} cannot run {why}")


def plan_level_memory(config: Config, module: Module, limits: Limits, target: Target,
                      programs: Mapping[str, Mapping[str, ProgramSpec]], vocab_size: int, counts: Mapping[str, bytes]) -> MemoryPlan:
    """What an artifact will take on a target. The pool must hold one sequence of the full length, its drafts and all levels' pages.

    Raises ConfigError, with the table, if it does not or the budget is too small.
    """
    needs = []
    for level in module.levels:
        of_level = programs.get(level.name, {})
        logits = [program.taps["logits"].num_bytes for program in of_level.values() if "logits" in program.taps]
        needs.append(LevelNeed(
            level.name, None if "kv_of" in level.params else level.kv,
            sum(target.packed_bytes(weight.type) for weight in weight_nodes(level)),
            max((program.arena_bytes for program in of_level.values()), default=0), max(logits, default=0),
            input_widths(level.params, of_level.values(), vocab_size), window_of(level.params),
            target.level_bytes(level.kind, level.params, limits, len(counts.get(str(level.params.get("counts")), b"")))))
    plan = plan_memory(needs, limits, pool_bytes=config.memory.pool_bytes, budget=config.memory.total)
    try:
        plan.check(limits.max_model_len)
    except CapacityError as error:
        key = "kv_pool" if config.memory.total is None else "total"
        config.fail(f"memory.{key}", f"too small for target {target.name}: {error}")
    return plan


def level_params(config: Config, module: Module, level: LevelModule, memory: Sequence[MemoryPlan]) -> Mapping[str, Any]:
    """What the level's runtime half reads from the manifest; the target's also say what memory was planned."""
    if level is not module.target:
        return level.params
    budget = {} if config.memory.total is None else {"memory_bytes": config.memory.total}
    return {**level.params, "kv_pool_bytes": min(plan.pool_bytes for plan in memory), **budget}


def emit(module: Module, target: Target, vocab_size: int) -> tuple[dict[str, dict[str, ProgramSpec]], tuple[KernelSpec, ...]]:
    """Programs by level and name, and the kernels they need. Raises CompileError for nodes without a kernel."""
    programs: dict[str, dict[str, ProgramSpec]] = {}
    groups: list[tuple[KernelSpec, ...]] = []
    for level in module.levels:
        for name, graph in level.graphs.items():
            programs.setdefault(level.name, {})[name], kernels = emit_program(graph, target, name, level.name)
            groups.append(kernels)
        if level.kv is not None:
            programs[level.name]["commit"], kernels = emit_lowering(target.commit(level.kv), "commit", level.name)
            groups.append(kernels)
        if level is module.target:
            forward = programs[level.name]["forward"]
            lowering, arena_bytes = target.sample(forward.taps["logits"], vocab_size, forward.arena_bytes)
            program, kernels = emit_lowering(lowering, "sample", level.name)
            programs[level.name]["sample"] = replace(program, arena_bytes=arena_bytes)
            groups.append(kernels)
            if len(module.levels) > 1 and (lowering_of_choices := target.follow()) is not None:
                programs[level.name]["follow"], kernels = emit_lowering(lowering_of_choices, "follow", level.name)
                groups.append(kernels)
        if level is not module.target:
            groups.append(tuple(target.level_functions(level.kind, level.params)))
            draft = programs.get(level.name, {}).get("draft")
            if draft is not None and (call := target.grow(level, draft, vocab_size)) is not None:
                programs[level.name][PROGRAM], kernels = emit_trees(draft, call, int(level.params["depth"]))
                groups.append(kernels)
    own = programs[module.target.name]
    for level in module.levels[:-1]:
        if level.name in programs and (parts := target.ahead(level, programs[level.name], own)) is not None:
            programs[level.name][AHEAD], kernels = emit_ahead(level.name, programs[level.name], parts)
            groups.append(kernels)
    return programs, merge_specs(groups)


def write_programs(folder: Path, target: str, programs: Mapping[str, Mapping[str, ProgramSpec]]) -> dict[str, dict[str, str]]:
    """Paths of the programs' files by level and name."""
    return {
        level: {name: write_text(folder, f"program/{target}/{level}.{name}.json", spec.to_json()) for name, spec in of_level.items()}
        for level, of_level in programs.items()
    }


def pack_weights(folder: Path, level: LevelModule, target: Target, source: WeightSource, progress: Progress, rank: int = 0,
                 lead: Target | None = None) -> WeightFile:
    """Stream the level's weights, those of a rank, in the order its programs use them, one tensor in memory at a time; with a `lead` only
    those that the target lays out otherwise than it."""
    nodes = {node.name: node for node in (weight_nodes(level) if lead is None else own_nodes(level, target, lead))}
    done = iter(range(1, len(nodes) + 1))

    def pack(name: str) -> Any:
        progress.step(next(done), len(nodes), name)
        return target.pack(nodes[name].type, read_weight(nodes[name], source))

    path = folder / rank_file(weights_path(level.name, target.family if lead else ""), rank)
    return write_weights(path, [(name, target.packed_bytes(node.type)) for name, node in nodes.items()], pack)


def check_ranks(config: Config, targets: Sequence[Target], verify_each: bool) -> None:
    """Raises ConfigError for a split that cannot be run, or checked."""
    if config.tensor_parallel == 1:
        return
    for target in targets:
        if target.device != "cpu":
            config.fail("tensor_parallel", f"target {target.name} has no all-reduce yet; CPU targets have")
    if Shard.name in config.passes.disable:
        config.fail("passes.disable", f"'{Shard.name}' is what tensor_parallel asks for; leave out one of the two")
    if verify_each:
        config.fail("tensor_parallel", "--verify-each executes one rank alone, which is not the model; compile without one of the two")


def weight_nodes(level: LevelModule) -> tuple[Node, ...]:
    """The weights in the file of a level, each name once, in order of first use."""
    shared = level.params.get("shared", {})
    return tuple({node.name: node for graph in level.graphs.values() for node in graph.weights() if node.name not in shared}.values())


def own_nodes(level: LevelModule, target: Target, lead: Target) -> tuple[Node, ...]:
    """The weights that a target lays out otherwise than the lead, whose file the level's targets share."""
    return tuple(node for node in weight_nodes(level) if target.layout(node.type) != lead.layout(node.type))


def weights_path(level: str, family: str = "") -> str:
    """The file of a level's weights; with a family of targets, that of what only it reads, in a folder: no level's name is a path."""
    return f"weights/{family}/{level}.safetensors" if family else f"weights/{level}.safetensors"


def model_info(config: Config, source: ModelSource) -> ModelInfo:
    return ModelInfo(
        name=config.target.name or source.name,
        architecture=source.architecture,
        vocab_size=source.vocab_size,
        hidden_size=int(source.config["hidden_size"]),
        num_layers=int(source.config["num_hidden_layers"]),
        bos_token_id=source.bos_token_id,
        eos_token_ids=source.eos_token_ids,
        weights_dtype=config.target.weights,
        source=source.label,
    )
