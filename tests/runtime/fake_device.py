"""A device in numpy with a model one can compute by hand, to test everything above the kernels.

A token slot of a page holds (token, position). A row's choice is a hash of its whole visible sequence *as read back through the page
table and the scratch slab*, so that any mistake in paging, commit, rollback or ancestors changes the text; a slot that holds another
position than the row expects raises at once. `continuation` is the same model without any of that.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from mlsdc.runtime.device.base import BoundProgram, Device, LevelMemory
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.levels.base import Level
from mlsdc.runtime.manifest import LevelInfo, Manifest, ModelInfo, Plan
from mlsdc.runtime.sampling.oracle import sample
from mlsdc.runtime.step import Array, Header, Limits, StepBuffers, mask_words
from mlsdc.runtime.tokenizer import Tokenizer
from tests.function_level import sends_all

VOCAB = 13
POISON = -77


def choose(tokens: Sequence[int], vocab: int = VOCAB) -> int:
    """The model: mostly a function of the last two tokens (so that text repeats), sometimes of all of them."""
    digest = zlib.crc32(np.asarray(tokens, np.int32).tobytes())
    if digest % 6 == 0:
        return (digest >> 8) % vocab
    return (3 * tokens[-1] + (tokens[-2] if len(tokens) > 1 else 5) + 1) % vocab


def continuation(prompt: Sequence[int], count: int, vocab: int = VOCAB) -> list[int]:
    """What the target says after `prompt`, greedily."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(choose(tokens, vocab))
    return tokens[len(prompt):]


class FakeProgram(BoundProgram):
    def __init__(self, name: str, memory: FakeMemory) -> None:
        self.name = name
        self.memory = memory
        self.runs = 0

    def run(self) -> None:
        self.runs += 1
        if self.name == "forward":
            self.memory.forward()
        elif self.name == "sample":
            sample(self.memory.buffers, self.memory.logits(), self.memory.vocab)
        else:
            self.memory.commit()

    def tap(self, name: str) -> Array:
        assert name == "logits"
        return self.memory.logits()

    def profile(self) -> list[tuple[str, str, float]]:
        self.run()
        return []


class FakeMemory(LevelMemory):
    def __init__(self, limits: Limits, page_size: int, num_pages: int, vocab: int) -> None:
        self.buffers = StepBuffers(limits, page_size, {"masks": mask_words(vocab)})
        self.programs = {name: FakeProgram(name, self) for name in ("forward", "commit", "sample")}
        self.num_pages = num_pages
        self.vocab = vocab
        self.slots = np.full((num_pages * page_size, 2), POISON, np.int32)
        self.rows_run: list[int] = []

    def read_page(self, page: int) -> Array:
        size = self.buffers.page_size
        return self.slots[page * size : (page + 1) * size].copy().view(np.uint8).reshape(-1)

    def write_page(self, page: int, data: Array) -> None:
        size = self.buffers.page_size
        self.slots[page * size : (page + 1) * size] = data.view(np.int32).reshape(size, 2)

    def forward(self) -> None:
        b, size = self.buffers, self.buffers.page_size
        rows, seqs, outs = (int(b.header[w]) for w in (Header.ROWS, Header.SEQS, Header.OUT))
        assert 0 < rows <= len(b.tokens)
        assert 0 < seqs <= len(b.seq_ctx)
        assert outs <= len(b.out_rows)
        self.rows_run.append(rows)
        runs = [(int(b.seq_row[s]), int(b.seq_rows[s])) for s in range(seqs)]
        assert runs == _runs(b.row_seq[:rows].tolist()), "rows of a sequence are contiguous"
        assert 0 <= b.tokens[:rows].min() <= b.tokens[:rows].max() < self.vocab, "a row's token has an embedding"
        assert b.positions[:rows].max() < b.limits.max_model_len, "a row's position has an angle"
        own = np.empty(rows, np.int64)
        for row in range(rows):  # write all keys first, as each layer does
            seq, slot, position = int(b.row_seq[row]), int(b.row_slot[row]), int(b.positions[row])
            table, at = (b.page_table, position) if slot < 0 else (b.scratch_table, slot)
            own[row] = int(table[seq, at // size]) * size + at % size
        assert len(set(own.tolist())) == rows, "two rows write one slot"
        self.slots[own, 0] = b.tokens[:rows]
        self.slots[own, 1] = b.positions[:rows]
        for out in range(outs):
            b.choices[out] = choose(self.visible(int(b.out_rows[out])), self.vocab)

    def visible(self, row: int) -> list[int]:
        """The tokens a row reads, itself included; checks that each lies at the position it was written for."""
        b, size = self.buffers, self.buffers.page_size
        seq, slot, position = int(b.row_seq[row]), int(b.row_slot[row]), int(b.positions[row])
        length = position + 1 if slot < 0 else int(b.seq_ctx[seq])
        at = np.arange(length)
        slots = (b.page_table[seq, at // size] * size + at % size).tolist()
        if slot >= 0:
            word = int(b.ancestors[row])
            bits = [bit for bit in range(64) if word >> bit & 1]
            assert bits[-1] == slot, "a row reads itself last"
            slots += [int(b.scratch_table[seq, bit // size]) * size + bit % size for bit in bits]
        read = self.slots[slots]
        assert read[:, 1].tolist() == list(range(position + 1)), f"row {row} of sequence {seq} reads positions {read[:, 1].tolist()}"
        tokens: list[int] = read[:, 0].tolist()
        return tokens

    def commit(self) -> None:
        b = self.buffers
        count = int(b.header[Header.COMMITS])
        self.slots[b.commit_dst[:count]] = self.slots[b.commit_src[:count]]

    def logits(self) -> Array:
        """Logits whose greatest is the choice; the others follow from the row's tokens."""
        b = self.buffers
        result = np.zeros((b.limits.max_logit_rows, self.vocab + 3), np.float32)  # 3 padding ids, never to be chosen
        for out in range(int(b.header[Header.OUT])):
            result[out] = logits_of(self.visible(int(b.out_rows[out])), self.vocab)
        return result


def logits_of(tokens: Sequence[int], vocab: int = VOCAB) -> Array:
    history = zlib.crc32(bytes(token % 256 for token in tokens))
    endings = [zlib.crc32(token.to_bytes(2)[token < 256 :], history) for token in range(vocab)]
    row = np.array([digest % 1000 / 1000 for digest in endings] + [9.0] * 3, np.float32)
    row[choose(tokens, vocab)] = 2.0
    return row


class FakeDevice(Device):
    name = "fake"

    def __init__(self) -> None:
        self.closed = 0

    def load_level(self, level: str, num_pages: int) -> LevelMemory:
        raise NotImplementedError

    def close(self) -> None:
        self.closed += 1


def _runs(values: Sequence[int]) -> list[tuple[int, int]]:
    """(start, length) of each run of equal values; they must be 0, 1, 2, …"""
    runs: list[tuple[int, int]] = []
    for i, value in enumerate(values):
        if value == len(runs):
            runs.append((i, 1))
        else:
            assert value == len(runs) - 1
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
    return runs


def make_manifest(limits: Limits, *, vocab: int = VOCAB, eos: tuple[int, ...] = (), drafts: int = 8, levels: Sequence[LevelInfo] = ()
                  ) -> Manifest:
    model = ModelInfo("fake", "fake", vocab, 1, 1, None, eos, "i8", "tests")
    target = LevelInfo("target", "target", {})
    return Manifest(model, limits, (*levels, target), (), Plan(limits.max_tree_nodes, drafts), {}, {}, {}, {})


def make_engine(level: Level | None = None, *, page_size: int = 4, num_pages: int = 200, max_model_len: int = 96, max_num_seqs: int = 8,
                max_num_batched_tokens: int = 40, max_logit_rows: int = 40, max_tree_nodes: int = 16, drafts: int = 8, vocab: int = VOCAB,
                eos: tuple[int, ...] = (), tokenizer: Tokenizer | None = None) -> Engine:
    """An engine over the fake device. `engine._memory` is a FakeMemory."""
    limits = Limits(max_model_len, max_num_seqs, max_num_batched_tokens, max_logit_rows, max_tree_nodes)
    info = [LevelInfo(level.name, level.kind, {})] if level else []
    manifest = make_manifest(limits, vocab=vocab, eos=eos, drafts=drafts, levels=info)
    memory = FakeMemory(limits, page_size, num_pages, vocab)
    return sends_all(Engine(manifest, FakeDevice(), memory, [level] if level else [], tokenizer=tokenizer))
