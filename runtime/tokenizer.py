"""Text to token ids: `tokenizer.json` by the tokenizers library, chats by the artifact's own template in a jinja2 sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mlsdc.runtime.detokenize import Detokenizer, Vocabulary
from mlsdc.runtime.errors import ArtifactError, RequestError

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import Tokenizer as HfTokenizer

Message = Mapping[str, Any]


class Tokenizer:
    """Thread-safe. `chat_template` None: the model has none, and chats are refused."""

    def __init__(self, tokenizer: HfTokenizer, *, chat_template: str | None = None, bos_token_id: int | None = None,
                 eos_token_id: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = Vocabulary(tokenizer)
        self._source = chat_template
        self._template: Template | None = None
        self._names = {
            "bos_token": "" if bos_token_id is None else tokenizer.id_to_token(bos_token_id) or "",
            "eos_token": "" if eos_token_id is None else tokenizer.id_to_token(eos_token_id) or "",
        }

    @staticmethod
    def open(tokenizer_json: Path, chat_template: Path | None = None, *, bos_token_id: int | None = None, eos_token_id: int | None = None
             ) -> Tokenizer:
        """Raises ArtifactError if the file is not a tokenizer."""
        from tokenizers import Tokenizer as HfTokenizer

        try:
            tokenizer = HfTokenizer.from_file(str(tokenizer_json))
        except Exception as error:  # the library raises plain Exception
            raise ArtifactError(f"{tokenizer_json.name}: not a tokenizer ({error})") from None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        template = None if chat_template is None else chat_template.read_text(encoding="utf-8")
        return Tokenizer(tokenizer, chat_template=template, bos_token_id=bos_token_id, eos_token_id=eos_token_id)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raises RequestError for text that is not valid Unicode (lone surrogates)."""
        try:
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError):
            raise RequestError("prompt: the text is not valid Unicode") from None
        return ids

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        stream = self.stream(skip_special_tokens=skip_special_tokens)
        return stream.feed(tokens) + stream.flush()

    def stream(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        return self.vocabulary.stream(skip_special_tokens=skip_special_tokens)

    @property
    def chat_template(self) -> str | None:
        """Its source."""
        return self._source

    @property
    def has_chat_template(self) -> bool:
        return self._source is not None

    def chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> list[int]:
        """Token ids of a chat, ready for the assistant's turn. Raises RequestError, naming the message."""
        return self.encode(self.render_chat(messages, add_generation_prompt=add_generation_prompt, **variables), add_special_tokens=False)

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        from jinja2.exceptions import TemplateError

        for i, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise RequestError(f"messages[{i}]: {message!r}, expected an object with 'role' and 'content'")
            if "content" not in message and "tool_calls" not in message:
                raise RequestError(f"messages[{i}]: no 'content'")
        if not messages:
            raise RequestError("messages: empty, expected at least one message")
        template = self._compiled()
        try:
            return template.render(messages=messages, add_generation_prompt=add_generation_prompt, **self._names, **variables)
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise RequestError(f"messages: the model's chat template refused them: {error}") from None

    def _compiled(self) -> Template:
        if self._source is None:
            raise RequestError("messages: this model has no chat template: give a prompt instead")
        if self._template is None:
            from jinja2.exceptions import TemplateError
            from jinja2.ext import loopcontrols
            from jinja2.sandbox import ImmutableSandboxedEnvironment

            environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
            environment.filters["tojson"] = _tojson
            environment.globals["raise_exception"] = _raise_exception
            environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
            try:
                self._template = environment.from_string(self._source)
            except TemplateError as error:
                raise ArtifactError(f"chat_template.jinja: {error}") from None
        return self._template


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    from jinja2.exceptions import TemplateError

    raise TemplateError(message)
