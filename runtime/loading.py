"""From an artifact's folder to an engine that can serve: device, levels, pages, tokenizer, and what was measured on this machine."""

from __future__ import annotations

from pathlib import Path

from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.device import open_device
from mlsdc.runtime.device.base import Device, LevelMemory
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.kv_window import window_of
from mlsdc.runtime.level_pages import level_pool
from mlsdc.runtime.levels import make_level
from mlsdc.runtime.levels.base import Level
from mlsdc.runtime.levels.ngram_ahead import on_device
from mlsdc.runtime.manifest import LevelInfo
from mlsdc.runtime.memory_plan import load_plan
from mlsdc.runtime.plan_file import find as find_plan
from mlsdc.runtime.plan_file import machine_key
from mlsdc.runtime.slabs import SlabPool
from mlsdc.runtime.tokenizer import Tokenizer


def load_engine(path: str | Path, *, threads: int | None = None, num_pages: int | None = None, kv_pool_bytes: int | None = None,
                memory_bytes: int | None = None, device: str = "auto", plan_file: str | Path | None = None,
                kernel_file: str | Path | None = None, planned: bool = True) -> Engine:
    """`Engine.load`; without `planned` no plan is looked for."""
    artifact = Artifact.open(path)
    manifest = artifact.manifest
    target = artifact.pick_target(device)
    plan = load_plan(artifact, target, num_pages=num_pages, kv_pool_bytes=kv_pool_bytes, budget=memory_bytes)
    tokenizer = _open_tokenizer(artifact)
    opened = open_device(artifact, target, threads=threads)
    try:
        opened.check_room(plan)
        opened.take_kernels(Path(kernel_file) if kernel_file else None)
        levels = [make_level(info, i, opened.native, artifact) for i, info in enumerate(manifest.levels[:-1])]
        memory = opened.load_level(manifest.target_level.name, plan.num_pages)
        levels = [on_device(level, info, opened, memory) for level, info in zip(levels, manifest.levels, strict=False)]
        slabs = SlabPool(plan.num_slabs, plan.slab_bytes)
        engine = Engine(manifest, opened, memory, levels, tokenizer=tokenizer, slabs=slabs)
        for info, level in zip(manifest.levels, levels, strict=False):
            if info.programs:
                _bind(level, opened, info, memory, slabs)
        engine.drafting.use(opened)
        if levels and planned:
            machine = machine_key(opened.name, getattr(opened, "threads", None))
            engine.drafting.take(*find_plan(artifact, machine, Path(plan_file) if plan_file else None))
        return engine
    except BaseException:
        opened.close()
        raise


def _bind(level: Level, device: Device, info: LevelInfo, target: LevelMemory, slabs: SlabPool) -> None:
    """Give a drafting level its programs, and pages of its own from the slabs all levels share. Its prefixes are not reused."""
    memory = device.load_level(info.name, slabs.num_slabs * slabs.slab_bytes // info.kv.page_bytes if info.kv else 0)
    own = info.kv is not None and "kv_of" not in info.params  # else it reads the target's
    level.bind(memory, target, level_pool(slabs, memory, reuse=False, window=window_of(info.params)) if own else None)


def _open_tokenizer(artifact: Artifact) -> Tokenizer | None:
    """The artifact's tokenizer, None if it has none (then prompts are token ids)."""
    files, model = artifact.manifest.files, artifact.manifest.model
    if "tokenizer.json" not in files:
        return None
    template = artifact.path("chat_template.jinja") if "chat_template.jinja" in files else None
    eos = model.eos_token_ids[0] if model.eos_token_ids else None
    return Tokenizer.open(artifact.path("tokenizer.json"), template, bos_token_id=model.bos_token_id, eos_token_id=eos)
