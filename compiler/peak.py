"""How much memory a compile takes, measured: a random model of a given size, compiled in a process of its own.

    python -m mlsdc.compiler.peak --gib 1

The fixed part is what the same compile takes for a model of the same shape but tiny: torch, transformers, TVM, LLVM. What the large model
takes beyond it is compared with its largest tensor in f32, which is how tensors are read.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

HEAD_DIM, LAYERS = 64, 12


def shape_of(gib: float) -> dict[str, Any]:
    """A Llama whose bf16 tensors take about `gib` GiB."""
    hidden = max(128, round((gib * 2**30 / 2 / 160) ** 0.5 / 128) * 128)  # 12 layers and two tables of 16 hidden rows: 160 hidden^2
    heads, inner = hidden // HEAD_DIM, 8 * hidden // 3 // 128 * 128
    return {
        "model_type": "llama", "vocab_size": max(256, 16 * hidden), "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": LAYERS, "num_attention_heads": heads, "num_key_value_heads": heads, "max_position_embeddings": 2048,
        "tie_word_embeddings": False, "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    }  # fmt: skip


def tensors_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        shapes |= {f"{at}.self_attn.{part}_proj.weight": (hidden, hidden) for part in "qkvo"}
        shapes |= {f"{at}.mlp.{part}_proj.weight": (inner, hidden) for part in ("gate", "up")}
        shapes |= {f"{at}.mlp.down_proj.weight": (hidden, inner)}
        shapes |= {f"{at}.{part}_layernorm.weight": (hidden,) for part in ("input", "post_attention")}
    return shapes


def write_model(folder: Path, config: dict[str, Any]) -> tuple[int, int]:
    """A Hugging Face folder of random bf16 tensors, written one by one; bytes of the largest tensor in f32, and of the whole file."""
    header, offset, largest = dict[str, Any](), 0, 0
    shapes = tensors_of(config)
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset, largest = offset + size, max(largest, 2 * size)
    text = json.dumps(header).encode()
    generator = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            for start in range(0, int(np.prod(shape)), 1 << 20):
                count = min(1 << 20, int(np.prod(shape)) - start)
                values = generator.standard_normal(count, np.float32) * np.float32(shape[-1] ** -0.5)
                file.write((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(byte_tokenizer(), encoding="utf-8")
    return largest, offset


def byte_tokenizer() -> str:
    """256 tokens, the bytes."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return str(tokenizer.to_str())


def measured(config: dict[str, Any], folder: Path) -> tuple[int, int, int]:
    """Peak resident bytes of compiling such a model in a fresh process; its largest tensor and its file in bytes."""
    folder.mkdir()
    largest, whole = write_model(folder, config)
    command = [sys.executable, "-m", "mlsdc.compiler.peak", "--compile", str(folder), str(folder.with_suffix(".mlsdc"))]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return int(found.stdout.split()[-1]), largest, whole


def compile_here(model: str, output: str) -> int:
    """Compile and say this process's peak. Pages of the mapped checkpoint count as long as they are not needed elsewhere."""
    from mlsdc.compiler import compile_model

    limits = {"max_model_len": 512, "max_num_seqs": 2, "max_num_batched_tokens": 64}
    compile_model({"target": {"model": model}, "cascade": [], "memory": {"kv_pool": "256MiB"}, "limits": limits}, output)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gib", type=float, default=1.0, help="of the random model's tensors, in bf16")
    parser.add_argument("--compile", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.compile:
        print(compile_here(*args.compile))
        return 0
    with tempfile.TemporaryDirectory() as name:
        fixed, _, _ = measured(shape_of(0.0), Path(name) / "tiny")
        peak, largest, whole = measured(shape_of(args.gib), Path(name) / "large")
    mib = 2**20
    print(f"model {whole / mib:.0f} MiB, largest tensor {largest / mib:.0f} MiB in f32")
    print(f"peak {peak / mib:.0f} MiB = {fixed / mib:.0f} MiB fixed + {(peak - fixed) / largest:.2f} x the largest tensor")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
