"""A family's tiny random model: transformers' module, the same as a Hugging Face folder, and its captured and raised graphs."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import nn

from mlsdc.compiler.capture import load_source
from mlsdc.compiler.capture.torch_export import Captured, capture_model
from mlsdc.compiler.families import FAMILIES
from mlsdc.compiler.graph import Graph, Node, Weight
from mlsdc.compiler.module import LevelModule, Module
from mlsdc.compiler.pipeline import run_pipeline
from mlsdc.passes import PassOptions, default_pipeline
from mlsdc.runtime.step import Limits
from tests.models import openelm  # noqa: F401  (registers it with transformers)

LIMITS = Limits(max_model_len=96, max_num_seqs=4, max_num_batched_tokens=96, max_logit_rows=96, max_tree_nodes=7)
PAGE = 16
# what a transformers itself cannot run: there is nothing to compare with
OWN_FAULTS = {("DBRX", "5.6.2"): "its router and experts take ffn_hidden_size numbers instead of d_model, and matrices are not turned"}
BY_NAME = {family.name: family for family in FAMILIES}


def proven_by(proof: str) -> list[str]:
    """Names of the families that claim the proof: what a test is run for."""
    return [family.name for family in FAMILIES if proof in family.proofs]


@functools.cache
def hf_model(name: str) -> nn.Module:
    """Random, f32, on the CPU. Every layer matters: projections keep the scale of their input, norms are not all ones."""
    torch.set_num_threads(1)
    if fault := OWN_FAULTS.get((name, transformers.__version__)):
        pytest.skip(f"transformers {transformers.__version__} cannot run {name}: {fault}")
    transformers.utils.logging.set_verbosity_error()
    config = transformers.AutoConfig.for_model(**json.loads(json.dumps(BY_NAME[name].tiny)))
    eager = bool(getattr(config, "attn_logit_softcapping", None))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager" if eager else "sdpa").eval()
    generator = torch.Generator().manual_seed(1)
    for path, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        if parameter.dim() == 1:
            offset = 0.0 if path.endswith("bias") or "gemma" in config.model_type else 1.0
            parameter.normal_(offset, 0.2, generator=generator)
        else:
            scale = 0.3 if "embed_tokens" in path or "wte" in path else parameter.shape[-1] ** -0.5
            if path.endswith(("mlp.gate.weight", "router.layer.weight")):
                scale *= 4  # a choice among experts that is close matters little
            parameter.normal_(0.0, scale, generator=generator)
    return model  # type: ignore[no-any-return]


@functools.cache
def folder(name: str) -> Path:
    """The model as a Hugging Face folder. Tokens are bytes. It lives as long as the process."""
    kept = tempfile.TemporaryDirectory(prefix="mlsdc-models-")
    _FOLDERS.append(kept)
    path = Path(kept.name) / "tiny"
    hf_model(name).save_pretrained(path)  # type: ignore[operator]
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@functools.cache
def captured(name: str) -> Captured:
    """The folder's model, captured on the meta device for LIMITS."""
    return capture_model(load_source(str(folder(name))), max_tokens=LIMITS.max_model_len)


def after(name: str, last: str) -> Graph:
    """The target's graph as the default pipeline leaves it after the pass `last`."""
    passes = default_pipeline(PassOptions(LIMITS, kv_page_size=PAGE))
    names = [pass_.name for pass_ in passes]
    module = Module("tiny", (LevelModule("target", "model", {}, {"forward": captured(name).graph}),))
    return run_pipeline(module, passes[: names.index(last) + 1]).target.graphs["forward"]


def weights_of(name: str) -> functools.partial[torch.Tensor]:
    """What the interpreter asks for a weight node."""
    return weight_reader(captured(name))


def weight_reader(source: Captured) -> functools.partial[torch.Tensor]:
    return functools.partial(_weight, source)


def _weight(source: Captured, node: Node) -> torch.Tensor:
    assert isinstance(node.op, Weight)
    return torch.cat([torch.from_numpy(source.weights.read(name)) for name in node.op.sources])


def tokens_for(name: str, count: int) -> torch.Tensor:
    return torch.randint(0, BY_NAME[name].tiny["vocab_size"], (count,), generator=torch.Generator().manual_seed(2))

