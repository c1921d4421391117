"""A small random Llama as a Hugging Face folder, awkward on purpose: k % 64 is 32, three query heads a kv head, padded vocabulary."""

from __future__ import annotations

from pathlib import Path

VOCAB, PADDED_VOCAB = 256, 272
LIMITS = {"max_model_len": 400, "max_num_seqs": 6, "max_num_batched_tokens": 56, "max_logit_rows": 56}
TREE_NODES = 15


def config(model: Path) -> dict[str, object]:
    """The model.yaml of the tiny artifact."""
    return {
        "target": {"model": str(model), "name": "tiny", "kv": {"dtype": "bf16", "page_size": 16}},
        "cascade": [{"kind": "ngram", "name": "lookup", "max_nodes": TREE_NODES, "width": 2, "min_probability": 0.01}],
        "memory": {"kv_pool": "8MiB"},
        "limits": LIMITS,
    }


def write_model(folder: Path) -> None:
    """Weights wide enough that the text wanders, and a tokenizer of one token a byte."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    from mlsdc.runtime.detokenize import byte_of_char

    torch.set_num_threads(1)
    torch.manual_seed(0)
    llama = transformers.LlamaConfig(
        vocab_size=PADDED_VOCAB, hidden_size=96, intermediate_size=128, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
        max_position_embeddings=512, initializer_range=0.15, tie_word_embeddings=False, bos_token_id=None, eos_token_id=0)
    transformers.LlamaForCausalLM(llama).save_pretrained(folder)
    tokenizer = Tokenizer(BPE(vocab=byte_of_char(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
