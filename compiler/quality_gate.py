"""`quality_gate` of model.yaml: a compile measures what its cache format costs, and refuses an artifact that loses more than is allowed."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from mlsdc.compiler.config import Config, GateConfig
from mlsdc.compiler.config_kv import KvConfig
from mlsdc.compiler.errors import CompileError
from mlsdc.compiler.progress import Progress
from mlsdc.runtime.bench.quality import Quality, Scored, evaluate, evaluation_text
from mlsdc.runtime.errors import ArtifactError

REFERENCE = "bf16"


def check_quality(config: Config, folder: Path, compile_model: Callable[..., Any], progress: Progress) -> None:
    """Measure the artifact in `folder` against one with a 16-bit cache, compiled beside it. Does nothing without a gate.

    Raises CompileError with every figure that is beyond its bound, ConfigError where this machine cannot run the artifact.
    """
    gate = config.quality_gate
    if gate is None or config.target.kv.format == REFERENCE:
        return
    progress.stage("quality")
    with tempfile.TemporaryDirectory(prefix="mlsdc-gate-") as aside:
        plain = dataclasses.replace(
            config, target=dataclasses.replace(config.target, kv=KvConfig(REFERENCE, page_size=config.target.kv.page_size)), cascade=(),
            quality_gate=None, memory=dataclasses.replace(config.memory, kv_pool=None, total=None))
        reference = compile_model(plain, Path(aside) / "reference.mlsdc")
        try:
            found = measure(gate, reference, folder, config)
        except ArtifactError as error:
            config.fail("quality_gate", f"cannot be measured on this machine: {error}")
    progress.step(1, 1, f"KL {found.kl:.2e}, perplexity {found.change:+.2%}, top-1 {found.top1:.2%}")
    if beyond := list(misses(gate, found)):
        raise CompileError(f"quality_gate: {config.target.kv.format} loses too much: {'; '.join(beyond)}; over {found.rows} rows of text")


def measure(gate: GateConfig, reference: Path, artifact: Path, config: Config) -> Quality:
    with ExitStack() as stack:
        one, other = (stack.enter_context(closing(Scored(path))) for path in (reference, artifact))
        text = evaluation_text() if gate.text is None else read(config, gate.text)
        if one.engine.tokenizer is None:
            config.fail("quality_gate", "the model has no tokenizer to read a text with")
        tokens = one.engine.tokenizer.encode(text[: 16 * gate.tokens])[: gate.tokens]
        if len(tokens) < 2:
            config.fail("quality_gate.text", f"{len(tokens)} tokens, expected at least 2")
        (found,) = evaluate(one, [other], tokens, min(gate.window, one.engine.manifest.limits.max_model_len), timed=False)
    return found


def read(config: Config, name: str) -> str:
    try:
        return (config.folder / Path(name).expanduser()).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        config.fail("quality_gate.text", f"{name} cannot be read ({getattr(error, 'strerror', None) or 'not UTF-8 text'})")


def misses(gate: GateConfig, found: Quality) -> Iterator[str]:
    """Every bound that is missed."""
    if gate.kl is not None and not found.kl <= gate.kl:
        yield f"KL {found.kl:.3g}, at most {gate.kl:g} is allowed"
    if gate.perplexity is not None and not found.change <= gate.perplexity:
        yield f"perplexity {found.change:+.2%}, at most {gate.perplexity:+.2%} is allowed"
    if gate.top1 is not None and not found.top1 >= gate.top1:
        yield f"top-1 agreement {found.top1:.2%}, at least {gate.top1:.2%} is allowed"
