"""A tiny random Llama: its folder, its artifact and the graphs after every pass."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Tiny:
    """Paths; read only."""

    model: Path
    yaml: Path
    artifact: Path
    dump: Path


def make(tiny: Tiny) -> None:
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    from mlsdc.compiler import compile_model
    from mlsdc.runtime.detokenize import byte_of_char

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256, initializer_range=0.1, tie_word_embeddings=True, bos_token_id=None, eos_token_id=0)
    transformers.LlamaForCausalLM(config).save_pretrained(tiny.model)
    tokenizer = Tokenizer(BPE(vocab=byte_of_char(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tiny.model / "tokenizer.json"))
    tiny.yaml.write_text(
        "target: {model: tiny, kv: {dtype: bf16, page_size: 16}}\ncascade: [{kind: ngram, name: lookup, max_nodes: 7, width: 2}]\n"
        "memory: {kv_pool: 2MiB}\nlimits: {max_model_len: 128, max_num_seqs: 4, max_num_batched_tokens: 64}\n")
    compile_model(tiny.yaml, tiny.artifact, dump_ir=tiny.dump)
