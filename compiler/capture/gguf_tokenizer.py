"""tokenizer.json (for the `tokenizers` library) from the vocabulary a GGUF file carries: BPE of bytes, or SentencePiece-like by scores.

What llama.cpp calls a pre-tokenizer is a list of regular expressions by name; the table below says the same as `tokenizers` steps.
"""

from __future__ import annotations

import json
from typing import Any

from mlsdc.compiler.capture.gguf_file import GgufFile
from mlsdc.compiler.errors import CaptureError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type
_SPACE = "\u2581"  # SentencePiece writes a space as a lower block

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
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind not in _KINDS:
        raise CaptureError(f"{file.where}: tokenizer '{kind}' is not one of {', '.join(_KINDS)}; use the Hugging Face directory instead")
    needed, parts = _KINDS[kind]
    for key in ("tokens", "token_type", needed):
        if f"tokenizer.ggml.{key}" not in file.metadata:
            raise CaptureError(f"{file.where}: metadata has no 'tokenizer.ggml.{key}'")
    tokens: list[str] = file.metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = file.metadata["tokenizer.ggml.token_type"]
    added = [
        {"id": i, "content": token, "special": kind == _CONTROL, **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)}
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    return json.dumps(whole | parts(file, tokens, kinds), ensure_ascii=False)


def _bpe(tokens: list[str], merges: list[list[str]], **facts: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": merges,
        **facts,
    }


def _by_merges(file: GgufFile, tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    """Byte-level BPE, `gpt2`."""
    metadata = file.metadata
    pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if pre not in PRE_TOKENIZERS:
        raise CaptureError(f"{file.where}: pre-tokenizer '{pre}' is not known; known are {', '.join(PRE_TOKENIZERS)}")
    steps = PRE_TOKENIZERS[pre]
    merges = [merge.split(" ", 1) for merge in metadata["tokenizer.ggml.merges"]]
    return {
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps},
        "post_processor": _post_processor(metadata, tokens, pre == "llama-bpe"),
        "decoder": _byte_level(True) | {"add_prefix_space": True},
        "model": _bpe(tokens, merges, ignore_merges=pre == "llama-bpe"),
    }


def _by_scores(file: GgufFile, tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    """SentencePiece's BPE, `llama`: of two neighbouring pieces that make a token, the pair with the best score is merged first."""
    metadata = file.metadata
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps: list[dict[str, Any]] = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": _SPACE})
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []),
    ]
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None)
    merges = merges_of(tokens, metadata["tokenizer.ggml.scores"], [kind in (_NORMAL, _USER_DEFINED) for kind in kinds])
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "post_processor": _post_processor(metadata, tokens, True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(tokens, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True),
    }


def merges_of(tokens: list[str], scores: list[float], usable: list[bool]) -> list[list[str]]:
    """Pairs of tokens that make a token, the one with the best score first; of equals the one with the lower id."""
    known = {token for token, use in zip(tokens, usable, strict=True) if use}
    order = sorted((i for i, token in enumerate(tokens) if usable[i] and len(token) > 1), key=lambda i: (-scores[i], i))
    pairs = (
        [tokens[i][:at], tokens[i][at:]] for i in order for at in range(1, len(tokens[i]))
        if tokens[i][:at] in known and tokens[i][at:] in known
    )  # fmt: skip
    return list(pairs)


_KINDS = {"gpt2": ("merges", _by_merges), "llama": ("scores", _by_scores)}


def _post_processor(metadata: dict[str, Any], tokens: list[str], default: bool) -> dict[str, Any] | None:
    """A begin-of-text token in front, where the file asks for it; `default` is what llama.cpp does where it does not say."""
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", default)
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
