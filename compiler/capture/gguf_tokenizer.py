"""tokenizer.json (for the `tokenizers` library) from the vocabulary a GGUF file carries: byte-level BPE only.

What llama.cpp calls a pre-tokenizer is a list of regular expressions by name; the table below says the same as `tokenizers` steps.
"""

from __future__ import annotations

import json
from typing import Any

from mlsdc.compiler.capture.gguf_file import GgufFile
from mlsdc.compiler.errors import CaptureError

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace("{1,3}", "")


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> list[dict[str, Any]]:
    return [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}, _byte_level(False)]


PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [_byte_level(True)],
    "smollm": [{"type": "Digits", "individual_digits": True}, _byte_level(True)],
    "llama-bpe": _split(_LLAMA3),
    "qwen2": _split(_QWEN2),
}


def tokenizer_json(file: GgufFile) -> str:
    """Text of tokenizer.json. Raises CaptureError for a tokenizer kind or pre-tokenizer that is not known."""
    metadata = file.metadata
    if metadata.get("tokenizer.ggml.model") != "gpt2":
        kind = metadata.get("tokenizer.ggml.model")
        raise CaptureError(f"{file.where}: tokenizer '{kind}' is not byte-level BPE ('gpt2'); use the Hugging Face directory instead")
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type"):
        if key not in metadata:
            raise CaptureError(f"{file.where}: metadata has no '{key}'")
    pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if pre not in PRE_TOKENIZERS:
        raise CaptureError(f"{file.where}: pre-tokenizer '{pre}' is not known; known are {', '.join(PRE_TOKENIZERS)}")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata["tokenizer.ggml.token_type"]
    added = [
        {"id": i, "content": token, "special": kind == _CONTROL, **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)}
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    steps = PRE_TOKENIZERS[pre]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps},
        "post_processor": _post_processor(metadata, tokens),
        "decoder": _byte_level(True) | {"add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre == "llama-bpe",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in metadata["tokenizer.ggml.merges"]],
        },
    }
    return json.dumps(tokenizer, ensure_ascii=False)


def _post_processor(metadata: dict[str, Any], tokens: list[str]) -> dict[str, Any] | None:
    """A begin-of-text token in front, where the file asks for it (llama.cpp's default for llama-bpe is to add it)."""
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", metadata.get("tokenizer.ggml.pre") == "llama-bpe")
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if not add_bos or bos is None:
        return None
    token = tokens[bos]
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, sequence],
        "pair": [first, sequence, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [bos], "tokens": [token]}},
    }
