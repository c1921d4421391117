"""Counts that a model.yaml names: checked against the model's tokenizer, and their place in the artifact."""

from __future__ import annotations

from typing import Any

from mlsdc.compiler.capture import ModelSource
from mlsdc.compiler.config import Config
from mlsdc.runtime.errors import ArtifactError
from mlsdc.runtime.levels.counts import Counts, open_file, tokenizer_id


def counts_name(level: Any, index: int) -> dict[str, str]:
    """What the artifact's level says of its counts: {"counts": path in the artifact}; nothing if it has none."""
    return {"counts": f"counts/{index}.counts"} if getattr(level, "counts", None) else {}


def counts_files(config: Config, source: ModelSource) -> dict[str, bytes]:
    """Path in the artifact -> bytes of every level's counts. Raises ConfigError, naming the level, for what is no file of counts, is
    corrupt, or was counted with another tokenizer."""
    files = {}
    for i, (where, level) in enumerate(config.drafters()):
        counts = getattr(level, "counts", None)
        if not counts:
            continue
        path = config.folder / counts
        try:
            file = open_file(path)
            Counts.open(path, source.vocab_size)
        except ArtifactError as error:
            config.fail(f"{where}.counts", str(error))
        if file.metadata.get("tokenizer") != source_tokenizer_id(source):
            config.fail(f"{where}.counts", f"{path.name}: counted with another tokenizer than {source.label} has (as many tokens, "
                        "other texts); count again with `mlsdc train --level counts`")
        files[counts_name(level, i)["counts"]] = path.read_bytes()
    return files


def source_tokenizer_id(source: ModelSource) -> str:
    from tokenizers import Tokenizer

    return tokenizer_id(Tokenizer.from_str(source.tokenizer_json))
