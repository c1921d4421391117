"""Families through the whole compile: the CPU artifact continues prompts as transformers does."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from mlsdc.compiler import compile_model
from mlsdc.runtime import Engine, SamplingParams, Speculation
from tests.models.gguf_writer import write_gguf
from tests.models.tiny import LIMITS, PAGE, folder, hf_model, proven_by

NEW = 10
CANDIDATES, CLEAR = 48, 3  # prompts of each length, and how many of them are compared
ROUTED = 1024  # candidates where every choice of experts has to be clear, too
LENGTHS = (3, 40)  # of the prompts: the longer one is beyond the tiny windows
BEYOND = {"Phi-3, long": (66, 80)}  # the original context, where transformers takes the long factors, as we compile for
PARAMS = SamplingParams(max_tokens=NEW, ignore_eos=True)
ROUTERS = {"DBRX": "router.layer"}  # whose choice of experts has to be clear, too: where two are nearly tied, rounding swaps them


def routed_margin(model: Any, router: str, sequences: torch.Tensor) -> torch.Tensor:
    """Of each sequence the least lead of a chosen expert over one that is not, in parts of the scores' spread: f32[sequences]."""
    leads: list[torch.Tensor] = []

    def score(module: Any, inputs: Any, scores: torch.Tensor) -> None:
        top = scores.reshape(*sequences.shape, -1).sort(-1, descending=True).values
        chosen = model.config.ffn_config.moe_top_k
        leads.append(((top[..., chosen - 1] - top[..., chosen]) / scores.std()).amin(-1))

    hooks = [part.register_forward_hook(score) for path, part in model.named_modules() if path.endswith(router)]
    model(sequences)
    for hook in hooks:
        hook.remove()
    return torch.stack(leads).amin(0)


@functools.cache
@torch.no_grad()
def clear_prompts(name: str, length: int) -> list[tuple[list[int], list[int]]]:
    """The prompts whose greedy continuation is least in doubt, by transformers' own scores, and the continuation."""
    model: Any = hf_model(name)
    prompts = torch.randint(0, 256, (ROUTED if name in ROUTERS else CANDIDATES, length), generator=torch.Generator().manual_seed(3))
    made = model.generate(prompts, max_new_tokens=NEW, do_sample=False, output_logits=True, return_dict_in_generate=True)
    top = torch.stack(made.logits).topk(2, dim=-1).values
    spread = torch.stack(made.logits).std(-1)
    lead = ((top[..., 0] - top[..., 1]) / spread).min(0).values
    if name in ROUTERS:
        lead = torch.minimum(lead, routed_margin(model, ROUTERS[name], made.sequences[:, :-1]))
    best = lead.argsort(descending=True)[:CLEAR].tolist()
    return [(prompts[i].tolist(), made.sequences[i, length:].tolist()) for i in best]


@pytest.mark.parametrize("name", proven_by("text"))
def test_the_artifact_continues_as_transformers_does(name: str, tmp_path: Path) -> None:
    continues(name, folder(name), tmp_path)


def test_experts_of_a_gguf_file_keep_their_blocks_and_continue_as_transformers_does(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "moe.gguf", hf_model("Qwen3-MoE"), "qwen3moe", gguf.GGMLQuantizationType.Q8_0)
    artifact = continues("Qwen3-MoE", file, tmp_path)
    origins = json.loads((artifact / "explain.json").read_text())["weights"]
    assert sum("experts" in name for name in origins["q8 from Q8_0: repacked as stored"]) == 4  # gate and up, and down, of two layers


def continues(name: str, model: Path, tmp_path: Path) -> Path:
    """Compile `model`, which holds the family's tiny model, and compare its texts; the artifact."""
    config = {
        "target": {"model": str(model), "kv": {"dtype": "bf16", "page_size": PAGE}},
        "cascade": [{"kind": "ngram", "name": "lookup", "max_nodes": LIMITS.max_tree_nodes, "width": 2}],
        "memory": {"kv_pool": "2MiB"},
        "limits": {"max_model_len": LIMITS.max_model_len, "max_num_seqs": 4, "max_num_batched_tokens": 64},
    }
    artifact = compile_model(config, tmp_path / "tiny.mlsdc")
    asked = [pair for length in BEYOND.get(name, LENGTHS) for pair in clear_prompts(name, length)]
    with Engine.load(artifact, threads=1) as engine:
        found = [result.token_ids for result in engine.generate([prompt for prompt, _ in asked], PARAMS)]
        plain = engine.generate([asked[-1][0]], SamplingParams(max_tokens=NEW, ignore_eos=True, speculation=Speculation(enabled=False)))
    assert found == [continuation for _, continuation in asked]
    assert plain[0].token_ids == found[-1]
    return artifact
