"""A Llama of a known shape whose weights are random numbers: `random:llama-3-8b`, `random:llama-3-8b/layers=2/seed=7`.

For what needs a model's sizes and not its words: kernels, memory, speed, where the checkpoint is not. Every tensor is made when it is read,
from the seed and its own name, so that a model that fits no memory compiles, and the same seed is the same artifact.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mlsdc.compiler.capture.source import Blocks, ModelSource
from mlsdc.compiler.errors import CaptureError
from mlsdc.runtime.detokenize import byte_of_char

if TYPE_CHECKING:
    from mlsdc.compiler.roofline_shapes import Shape

RANDOM = "random:"
MAX_LEN = 131072  # tokens: nothing was trained for fewer
MAX_LAYERS, MAX_SEED = 1024, 2**63 - 1


class RandomWeights:
    """Tensors of `shape` by their Hugging Face names: norms are ones; matrices uniform with mean 0 and variance 1 over the columns, so that
    rows of variance 1 stay so. (Words of a counter of 64 bits, four numbers of 16 bits each: the same with every version of numpy.)"""

    def __init__(self, shape: Shape, seed: int) -> None:
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        layer = {
            "input_layernorm": (shape.hidden,), "self_attn.q_proj": (q, shape.hidden), "self_attn.k_proj": (kv, shape.hidden),
            "self_attn.v_proj": (kv, shape.hidden), "self_attn.o_proj": (shape.hidden, q), "post_attention_layernorm": (shape.hidden,),
            "mlp.gate_proj": (shape.intermediate, shape.hidden), "mlp.up_proj": (shape.intermediate, shape.hidden),
            "mlp.down_proj": (shape.hidden, shape.intermediate)}
        vocabulary = (shape.vocab, shape.hidden)
        self.seed = seed
        self._shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": vocabulary,
            **{f"model.layers.{i}.{name}.weight": size for i in range(shape.layers) for name, size in layer.items()},
            "model.norm.weight": (shape.hidden,),
            **({} if shape.tied else {"lm_head.weight": vocabulary})}

    def names(self) -> tuple[str, ...]:
        return tuple(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._shapes:
            raise CaptureError(f"random weights: there is no tensor '{name}'")
        return self._shapes[name]

    def read(self, name: str) -> NDArray[np.float32]:
        shape = self.shape(name)
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        count = shape[0] * shape[1]
        key = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        words = np.random.Philox(key=np.frombuffer(key[:16], "<u8")).random_raw(-(-count // 4))
        values = words.astype("<u8", copy=False).view("<u2")[:count].astype(np.float32)
        values -= 32767.5
        values *= np.float32((12 / shape[1]) ** 0.5 / 65536)
        return values.reshape(shape)

    def block(self, name: str) -> Blocks | None:
        self.shape(name)
        return None


def random_source(ref: str) -> ModelSource:
    """What `ref` names. Raises CaptureError for a shape that is not known, or options that are not."""
    from mlsdc.compiler.roofline_shapes import SHAPES

    name, *options = ref.removeprefix(RANDOM).split("/")
    if name not in SHAPES:
        raise CaptureError(f"'{ref}': '{name}' is not a shape; shapes are {', '.join(SHAPES)}")
    given: dict[str, int] = {}
    for option in options:
        key, _, text = option.partition("=")
        low, high = {"layers": (1, MAX_LAYERS), "seed": (0, MAX_SEED)}.get(key, (0, -1))
        if key in given or not re.fullmatch("[0-9]{1,19}", text) or not low <= int(text) <= high:
            raise CaptureError(f"'{ref}': '{option}': expected layers=N (1 to {MAX_LAYERS}) or seed=N, each once")
        given[key] = int(text)
    shape, seed = replace(SHAPES[name], layers=given.get("layers", SHAPES[name].layers)), given.get("seed", 0)
    layers = f"/layers={shape.layers}" if "layers" in given else ""
    return ModelSource(
        label=f"{RANDOM}{name}{layers}/seed={seed}",
        name=f"random-{name}",
        license="",
        config=config_of(shape),
        weights=RandomWeights(shape, seed),
        tokenizer_json=json.dumps(byte_tokenizer(shape.vocab), ensure_ascii=False),
        chat_template="",
        num_tokens=shape.vocab,
        bos_token_id=None,
        eos_token_ids=(),
    )


def config_of(shape: Shape) -> dict[str, Any]:
    """Its config.json. No token ends a text."""
    return {
        "model_type": "llama", "hidden_act": "silu", "vocab_size": shape.vocab, "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate, "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "max_position_embeddings": MAX_LEN, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": shape.tied, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "bos_token_id": None,
        "eos_token_id": None, "pad_token_id": None}


def byte_tokenizer(vocab: int) -> dict[str, Any]:
    """tokenizer.json that makes a token of every byte; the others, which no text becomes, read as their ids."""
    tokens = dict(byte_of_char())
    tokens |= {f"Ġ{i}": i for i in range(len(tokens), vocab)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    bpe: dict[str, Any] = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
           "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": tokens, "merges": []}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None, "pre_tokenizer": level,
            "post_processor": None, "decoder": level, "model": bpe}
