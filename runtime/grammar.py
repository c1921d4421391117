"""Grammars: which tokens may come next, for every row of a step, drafted ones included (law L1).

A request has one matcher, at its last committed token. In a step it walks the drafted tree, forward and back: a node the grammar forbids
is cut off with all below it, each row that is left gets the mask of its own path. Tokens the grammar forces are drafted for free,
instead of what a level proposed. The target chooses among allowed tokens only, so the text is the same whatever was drafted.

llguidance does the matching (it needs no torch); it is imported when the first request with a grammar comes.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mlsdc.runtime.errors import RequestError
from mlsdc.runtime.request import StepItem
from mlsdc.runtime.sampling_params import Grammar
from mlsdc.runtime.step import Array, StepBuffers
from mlsdc.runtime.tree import Tree

if TYPE_CHECKING:
    from mlsdc.runtime.tokenizer import Tokenizer

# As Python's json writes it: no free white space, in which small models lose themselves, and keys that follow are forced.
JSON_OPTIONS: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MAX_CACHED = 64  # compiled grammars


class GrammarCompiler:
    """Makes matchers for one tokenizer. Thread-safe; the same grammar is compiled once."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = list(eos_token_ids)
        self._lock = threading.Lock()
        self._guide: Any = None  # llguidance's view of the tokenizer: a second's work for 50,000 tokens
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()

    def matcher(self, grammar: Grammar) -> Matcher:
        """A fresh matcher. Raises RequestError: a grammar that is wrong, or that nothing here can match."""
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is None:
                compiled = self._compiled[grammar] = self._compile(grammar)
                if len(self._compiled) > MAX_CACHED:
                    self._compiled.popitem(last=False)
            else:
                self._compiled.move_to_end(grammar)
            return Matcher(compiled.deep_copy(), frozenset(self._eos))

    def _compile(self, grammar: Grammar) -> Any:
        try:
            from llguidance import LLMatcher
        except ModuleNotFoundError:
            raise RequestError("grammar: this installation has no llguidance: pip install 'mlsdc[server]'") from None
        found = LLMatcher(self._tokens(), _source(grammar), log_level=0)
        if found.is_error():
            raise RequestError(f"grammar: {_one_line(found.get_error())}")
        if not any(found.compute_bitmask()):
            raise RequestError("grammar: no text matches it")
        return found

    def _tokens(self) -> Any:
        from llguidance import LLTokenizer

        if self._guide is None:
            if self._tokenizer is None:
                raise RequestError("grammar: this engine has no tokenizer")
            if not self._eos:
                raise RequestError("grammar: this model has no end token")
            self._guide = LLTokenizer(self._tokenizer.tokenizer.to_str(), n_vocab=self._vocab_size, eos_token=self._eos)
        return self._guide


def _source(grammar: Grammar) -> str:
    """llguidance's form of a grammar. Raises RequestError."""
    from llguidance import LLMatcher

    if grammar.kind == "regex":
        return str(LLMatcher.grammar_from_regex(grammar.text))
    if grammar.kind == "lark":
        return str(LLMatcher.grammar_from_lark(grammar.text))
    try:
        schema = {"type": "object"} if grammar.kind == "json_object" else json.loads(grammar.text)
        return str(LLMatcher.grammar_from_json_schema(schema, defaults=JSON_OPTIONS))  # type: ignore[arg-type]
    except (ValueError, RecursionError) as error:
        raise RequestError(f"grammar: not a JSON schema ({_one_line(str(error))})") from None


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:297] + "..."


class Matcher:
    """One choice's place in its grammar: after its committed tokens, except while a step's tree is walked."""

    def __init__(self, matcher: Any, eos: frozenset[int]) -> None:
        self._matcher = matcher
        self._eos = eos
        self.ended = False  # nothing but an end token may follow
        self.error: str | None = None  # why nothing can follow: the grammar is too complex here

    def copy(self) -> Matcher:
        return Matcher(self._matcher.deep_copy(), self._eos)

    def accept(self, tokens: Sequence[int]) -> int:
        """Commit tokens up to the one that completes the text, or that the matcher fails at (`error`); returns how many."""
        for count, token in enumerate(tokens, 1):
            if token in self._eos:
                self.ended = True
                return count
            if not self._matcher.consume_token(token):
                self.error = _one_line(self._matcher.get_error() or "stopped")
                return count
            if self._matcher.is_stopped():
                self.ended = True
                return count
        return len(tokens)

    def forced(self, most: int) -> list[int]:
        """Tokens that are all but certain to come, at most `most`."""
        return [] if self.ended else list(self._matcher.compute_ff_tokens()[:most])

    def prune(self, tree: Tree) -> Tree:
        """The tree without the nodes that the grammar forbids, and without what follows an end token."""
        kept: set[int] = set()

        def allowed(node: int) -> bool:
            token = tree.tokens[node]
            if token in self._eos:
                if self._matcher.is_accepting():
                    kept.add(node)
                return False  # nothing follows it
            if self._matcher.is_stopped() or not self._matcher.try_consume_tokens([token]):
                return False
            kept.add(node)
            return True

        self._walk(tree, allowed)
        return tree.select(kept)

    def fill(self, tree: Tree, masks: Array) -> None:
        """masks u32[1 + len(tree), words]: the masks of the last committed token's row and of each node's. `tree` is pruned."""
        self._mask(masks[0])

        def enter(node: int) -> bool:
            token = tree.tokens[node]
            if token in self._eos:
                masks[1 + node] = 0xFFFFFFFF  # no choice after it is ever used
                return False
            self._matcher.consume_token(token)
            self._mask(masks[1 + node])
            return True

        self._walk(tree, enter)

    def _walk(self, tree: Tree, enter: Callable[[int], bool]) -> None:
        """Depth first. `enter(node)` is called with the matcher after the node's parent; True if it consumed the node's token."""
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(tree.parents):
            children.setdefault(parent, []).append(node)
        todo = [(node, 0) for node in reversed(children.get(-1, ()))]  # (node, depth of its parent)
        depth = 0  # tokens the matcher has consumed
        while todo:
            node, below = todo.pop()
            if depth > below:
                self._matcher.rollback(depth - below)
            depth = below
            if enter(node):
                depth += 1
                todo += ((child, depth) for child in reversed(children.get(node, ())))
        if depth:
            self._matcher.rollback(depth)

    def _mask(self, row: Array) -> None:
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)


def fit_drafts(items: Sequence[StepItem], level: int) -> None:
    """After drafting: where the grammar leaves no choice its own tokens are the draft, as `level`'s; elsewhere it prunes the draft."""
    for item in items:
        matcher = item.request.grammar
        if matcher is None or not item.budget:
            continue
        if tokens := matcher.forced(item.budget):
            item.tree = Tree(tuple(tokens), tuple(range(-1, len(tokens) - 1)), (0.0,) * len(tokens), (level,) * len(tokens))
        elif item.tree:
            item.tree = matcher.prune(item.tree)


def fill_masks(buffers: StepBuffers, items: Sequence[StepItem]) -> None:
    """After the rows were written: the masks of all rows that choose."""
    for item in items:
        matcher = item.request.grammar
        if matcher is not None and item.wants_choice:
            last = item.out + item.outs
            matcher.fill(item.tree, buffers.masks[last - 1 - len(item.tree) : last])
