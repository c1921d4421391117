"""A small random Llama whose heads are wide enough for tensor cores, and its model.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB, PADDED_VOCAB = 256, 272
TREE_NODES = 15
LIMITS = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_logit_rows": 32}


def config(model: Path, hardware: str, **target: Any) -> dict[str, Any]:
    return {
        "target": {"model": str(model), "name": "tiny", "kv": {"dtype": "bf16", "page_size": 16}, **target},
        "cascade": [{"kind": "ngram", "name": "lookup", "max_nodes": TREE_NODES, "width": 2, "min_probability": 0.01}],
        "memory": {"kv_pool": "1MiB"},
        "limits": LIMITS,
        "hardware": hardware,
        "kernels": {"variants": False},
    }


def write_model(folder: Path, head_dim: int = 32) -> None:
    """Two layers of three heads over one kv head, k % 64 is 32, padded vocabulary; a tokenizer of one token a byte."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    from mlsdc.runtime.detokenize import byte_of_char

    torch.set_num_threads(1)
    torch.manual_seed(0)
    llama = transformers.LlamaConfig(
        vocab_size=PADDED_VOCAB, hidden_size=96, intermediate_size=128, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1,
        head_dim=head_dim, max_position_embeddings=512, initializer_range=0.15, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=0)
    transformers.LlamaForCausalLM(llama).save_pretrained(folder)
    tokenizer = Tokenizer(BPE(vocab=byte_of_char(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
