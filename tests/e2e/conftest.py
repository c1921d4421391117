"""A tiny random Llama as a Hugging Face folder with its model.yaml, and its artifact: the whole compile in seconds."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

YAML = """\
target: {model: tiny, kv: {dtype: bf16, page_size: 16}}
cascade: [{kind: ngram, name: lookup, max_nodes: 7, width: 2}]
memory: {kv_pool: 2MiB}
limits: {max_model_len: 128, max_num_seqs: 4, max_num_batched_tokens: 64}
"""


def write_model(folder: Path) -> Path:
    """`folder/tiny/` and `folder/model.yaml`; returns the latter. Tokens are bytes; most of the vocabulary is padding."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=4096, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256, tie_word_embeddings=True, bos_token_id=None, eos_token_id=0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "tiny")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tiny" / "tokenizer.json"))
    (folder / "model.yaml").write_text(YAML)
    return folder / "model.yaml"


@pytest.fixture(scope="session")
def tiny_yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny(tiny_yaml: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's artifact; read only. Compiled by the first worker that asks."""
    from mlsdc.compiler import compile_model

    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    artifact = shared / "tiny.mlsdc"
    with (shared / "tiny.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not artifact.exists():
            compile_model(tiny_yaml, artifact)
    return artifact
