"""A SentencePiece-like vocabulary in a GGUF file gives llama.cpp's ids."""

from __future__ import annotations

import importlib.util
import json
import pydoc_data.topics
import subprocess
import sys
from collections import Counter
from pathlib import Path

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from mlsdc.compiler.capture import load_source
from tests.capture.gguf_files import values

TEXTS = sorted(pydoc_data.topics.topics.values())[:12]
TRICKY = ["Hello world", " a  b   c", "x = 12345", "naïve 日本語 🎉", "line\n\n\tend ", "<s>the end</s> of it"]


def vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and kinds: specials, bytes, then pieces of English from frequent to rare, as SentencePiece orders BPE pieces."""
    kind = gguf.TokenType
    tokens, kinds = ["<unk>", "<s>", "</s>"], [kind.UNKNOWN, kind.CONTROL, kind.CONTROL]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    kinds += [kind.BYTE] * 256
    text = "".join(TEXTS).replace(" ", "▁").replace("\n", "▁")
    counts: Counter[str] = Counter()
    for size in (2, 3, 4):
        counts.update(text[i : i + size] for i in range(60_000))
    pieces = [piece for piece, _ in counts.most_common(600)]
    singles = [c for c in dict.fromkeys(text) if c not in pieces]
    tokens += [*pieces, *singles]
    kinds += [kind.NORMAL] * (len(pieces) + len(singles))
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces) + len(singles))]
    return tokens, scores, [int(kind) for kind in kinds]


@pytest.fixture(scope="module", params=[True, False], ids=["space in front", "no space in front"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spm") / "tiny.gguf"
    tokens, scores, kinds = vocabulary()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_block_count(1)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_space_prefix(request.param)
    for name, tensor in values().items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.from_str(load_source(str(path)).tokenizer_json)


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


LLAMA_CPP = """
import json, sys, llama_cpp
model = llama_cpp.Llama(sys.argv[1], vocab_only=True, verbose=False)
print(json.dumps([model.tokenize(text.encode(), add_bos=False, special=True) for text in json.load(sys.stdin)]))
"""


def test_ids_are_llama_cpps(path: Path, tokenizer: Tokenizer) -> None:
    """In a process of its own: llama.cpp and torch each bring an OpenMP."""
    if importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("llama.cpp is the oracle of tokenization: pip install llama-cpp-python")
    texts = [*TRICKY, *(topic[:2000] for topic in TEXTS)]
    done = subprocess.run([sys.executable, "-c", LLAMA_CPP, str(path)], input=json.dumps(texts), capture_output=True, text=True, check=True)
    assert [ids(tokenizer, text) for text in texts] == json.loads(done.stdout)


def test_text_survives(tokenizer: Tokenizer) -> None:
    @given(st.text(st.characters(exclude_characters="▁", exclude_categories=("Cs",)), max_size=40))
    def survives(text: str) -> None:
        assert tokenizer.decode(ids(tokenizer, text), skip_special_tokens=False) == text

    survives()


def test_the_begin_of_text_token_comes_first(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("a").ids[0] == 1
