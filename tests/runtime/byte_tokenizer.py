"""Tiny tokenizers for tests: one token a byte (plus two merges and two special tokens), and a SentencePiece-like one with byte fallback."""

from __future__ import annotations

from tokenizers import AddedToken, Regex, decoders, pre_tokenizers
from tokenizers import Tokenizer as HfTokenizer
from tokenizers.models import BPE

from mlsdc.runtime.detokenize import byte_of_char
from mlsdc.runtime.tokenizer import Tokenizer

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(*, merges: bool = False, chat_template: str | None = CHAT) -> Tokenizer:
    """Byte-level BPE. With `merges`, 'th' and 'the' are tokens, too."""
    vocab = dict(byte_of_char().items())
    pairs = [("t", "h"), ("th", "e")] if merges else []
    for pair in pairs:
        vocab["".join(pair)] = len(vocab)
    tokenizer = HfTokenizer(BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("한국", special=False)])
    return Tokenizer(tokenizer, chat_template=chat_template, bos_token_id=None, eos_token_id=tokenizer.token_to_id("<|im_end|>"))


def fallback_tokenizer() -> Tokenizer:
    """Pieces with U+2581 for a space and <0xNN> byte tokens, decoded as Llama's tokenizers are."""
    pieces = ["<unk>", *[f"<0x{byte:02X}>" for byte in range(256)], *"▁abcdefé한", "▁ab", "▁▁"]
    tokenizer = HfTokenizer(BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1, right=0)])
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return Tokenizer(tokenizer)


def unknown_decoder() -> HfTokenizer:
    tokenizer = HfTokenizer(BPE(vocab={"a": 0}, merges=[]))
    tokenizer.decoder = decoders.Sequence([decoders.Replace(Regex("a+"), "b"), decoders.Fuse()])
    return tokenizer
