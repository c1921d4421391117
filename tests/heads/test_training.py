"""Training of heads: it learns, it continues where it was stopped to the same bytes, and its errors are one line."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mlsdc.compiler.errors import HeadError
from mlsdc.compiler.heads.checkpoint import HeadFile, read_own, write_own
from mlsdc.compiler.heads.config import EagleConfig, HeadConfig, MedusaConfig
from mlsdc.compiler.heads.data import Sample, read_prompts, read_samples
from mlsdc.compiler.heads.modules import EagleHead, Frozen, MedusaHead, make_head
from mlsdc.compiler.heads.train import Trainer, TrainOptions, batches, run
from mlsdc.compiler.heads.train_cli import go_on
from mlsdc.runtime.tokenizer import Tokenizer

HIDDEN, VOCAB = 32, 48
EAGLE = EagleConfig(HIDDEN, HIDDEN, VOCAB, VOCAB, (2,), 2, 1, 16, 64, 1e-6, 10000.0)
EAGLE3 = EagleConfig(HIDDEN, HIDDEN, VOCAB, VOCAB, (1, 2, 3), 2, 1, 16, 64, 1e-6, 10000.0, style="eagle3")
MEDUSA = MedusaConfig(HIDDEN, HIDDEN, VOCAB, VOCAB, 2, 1e-6, (2,), known_next=True)
OPTIONS = TrainOptions(seed=1, epochs=3, batch_tokens=256, window=3, replay=2, held_out=4, eval_every=3, patience=99)


class FakeTarget:
    """Hidden states that are an embedding of the token and of the one before it."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(0)
        self.embed = torch.randn(VOCAB, HIDDEN, generator=g)
        self.frozen = Frozen(self.embed, torch.randn(VOCAB, HIDDEN, generator=g), torch.ones(HIDDEN))
        self.calls = 0
        self.layers = 4

    def hidden(self, tokens: torch.Tensor, taps: tuple[int, ...]) -> torch.Tensor:
        self.calls += 1
        x = self.embed[tokens] + self.embed[torch.roll(tokens, 1, 1)].flip(-1)
        return torch.cat([x * (tap + 1) for tap in taps], -1).bfloat16()


def samples(count: int = 40) -> list[Sample]:
    """Text of a simple rule, so that there is something to learn."""
    rng = random.Random(0)
    made = []
    for _ in range(count):
        tokens = [rng.randrange(VOCAB)]
        while len(tokens) < rng.randrange(20, 40):
            tokens.append((5 * tokens[-1] + 7) % VOCAB)
        made.append(Sample(tuple(tokens), 3))
    return made


def trainer(config: HeadConfig, checkpoint: Path | None = None, **changed: float) -> Trainer:
    torch.set_num_threads(1)
    target = FakeTarget()
    options = {"share": 0.5} if isinstance(config, MedusaConfig) else {"unroll": 2}
    head = make_head(config, target.frozen, seed=2, **options)
    settings = TrainOptions(**{**OPTIONS.__dict__, **changed})  # type: ignore[arg-type]
    return Trainer(head, target, config.taps, samples(), torch.arange(VOCAB), settings, checkpoint, autocast=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("config", [EAGLE, EAGLE3, MEDUSA], ids=["eagle", "eagle3", "medusa"])
def test_a_run_that_was_stopped_ends_with_the_same_bytes(tmp_path: Path, config: HeadConfig) -> None:
    whole = trainer(config)
    assert run([whole])
    stops = iter([False] * 4 + [True])
    assert not run([trainer(config, tmp_path / "c")], lambda: next(stops))
    again = trainer(config, tmp_path / "c")
    assert again.resume()
    assert again.streamed == 4
    assert run([again])
    for name, value in whole.head.tensors().items():
        assert torch.equal(value, again.head.tensors()[name]), name
    assert [point.acceptance for point in whole.curve] == [point.acceptance for point in again.curve]


@pytest.mark.parametrize("config", [EAGLE, MEDUSA], ids=["eagle", "medusa"])
def test_acceptance_grows(config: HeadConfig) -> None:
    made = trainer(config, epochs=24, eval_every=4)
    run([made])
    assert made.curve[-1].acceptance[0] > 0.3 > made.curve[0].acceptance[0] + 0.1
    assert made.best_length == max(point.length for point in made.curve)


@pytest.mark.parametrize("config", [EAGLE, EAGLE3, MEDUSA], ids=["eagle", "eagle3", "medusa"])
def test_what_the_target_thought_of_a_token_stands_before_it(config: HeadConfig) -> None:
    """The soft part of the loss by hand: of each token guessed, what the target's last hidden state of the token before says."""
    made = trainer(config, soft=1.0)
    batch = made.load(made.train[:5])
    assert batch.last is not None
    assert torch.equal(batch.hidden, trainer(config).load(made.train[:5]).hidden)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    made.head.cross_entropy = lambda logits, labels, taught: seen.append((labels, taught)) or logits.sum()  # type: ignore[assignment, func-returns-value]
    head = made.head.train()
    if isinstance(head, MedusaHead):
        head.share = 1.0
    head.losses(batch)
    first = 2 if not isinstance(config, MedusaConfig) else config.first
    for depth, (labels, taught) in enumerate(seen):
        wanted = []
        rows, length = batch.tokens.shape
        for row in range(rows):
            for at in range(first + depth, length):
                start = at - depth if isinstance(config, MedusaConfig) else at
                if batch.labels[row, at] >= 0 and batch.counted[row, start]:
                    x = batch.last[row, at - 1].float()
                    x = x * torch.rsqrt(x.pow(2).mean() + 1e-6) * made.head.frozen.norm
                    wanted.append((batch.labels[row, at], torch.log_softmax(x @ made.head.frozen.head.T, -1)))
        assert torch.equal(labels, torch.stack([label for label, _ in wanted]))
        assert torch.allclose(taught, torch.stack([logp for _, logp in wanted]), atol=1e-4)


def test_the_soft_loss_is_least_where_the_head_thinks_like_the_target() -> None:
    head = MedusaHead(MEDUSA, FakeTarget().frozen)
    head.soft = 1.0
    taught = torch.log_softmax(torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(5)), -1)
    labels = torch.zeros(6, dtype=torch.int64)
    entropy = -(taught.exp() * taught).sum(-1).mean()
    assert torch.allclose(head.cross_entropy(taught, labels, taught), entropy, atol=1e-5)
    assert head.cross_entropy(taught + torch.linspace(0, 1, VOCAB), labels, taught) > entropy + 0.01
    head.soft = 0.25
    half = head.cross_entropy(taught, labels, taught)
    assert torch.allclose(half, 0.75 * torch.nn.functional.cross_entropy(taught, labels) + 0.25 * entropy, atol=1e-5)


def test_acceptance_is_measured_against_the_text_alone() -> None:
    soft, hard = trainer(EAGLE, soft=1.0), trainer(EAGLE)
    soft.measure()
    hard.measure()
    assert soft.curve[0].acceptance == hard.curve[0].acceptance


def test_each_batch_passes_the_target_once_for_all_heads() -> None:
    first, second = trainer(EAGLE, eval_every=999), trainer(MEDUSA, eval_every=999)
    second.target = first.target
    run([first, second])
    held = len(batches(first.held, OPTIONS.batch_tokens, 0, 0))
    assert first.target.calls == len(first.plan) + 2 * held  # type: ignore[attr-defined]


def test_it_stops_when_held_out_acceptance_stops_growing() -> None:
    made = trainer(EAGLE, patience=1, epochs=50)
    run([made])
    assert made.streamed < len(made.plan)


def test_a_later_pass_sees_what_drafting_would_have_seen() -> None:
    """Pass 1 of row t is row 0 .. t - 1 of pass 0 and one row made of pass 0's output: computed one by one, it is the same."""
    torch.set_num_threads(1)
    target = FakeTarget()
    head = EagleHead(EAGLE, target.frozen, seed=3)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    from mlsdc.compiler.heads.modules import rope_table, shifted_rows

    tokens = torch.randint(0, VOCAB, (1, 9), generator=torch.Generator().manual_seed(4))
    hidden, embed = target.hidden(tokens, (2,)).float(), target.embed[tokens]
    table = rope_table(9, 16, 10000.0)
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    with torch.no_grad():
        first = head.step(hidden, embed, keys, values, table)
        second = head.step(shifted_rows(first, 1), embed, keys, values, table)
        for t in range(1, 9):
            mixed = torch.cat([hidden[:, :t], first[:, t - 1 : t]], 1)
            alone = head.step(mixed, embed[:, : t + 1], [], [], rope_table(t + 1, 16, 10000.0))
            assert torch.allclose(alone[:, t], second[:, t], atol=1e-4)


def test_a_share_of_the_text_is_learned_from() -> None:
    head = MedusaHead(MEDUSA, FakeTarget().frozen, share=0.5)
    made = trainer(MEDUSA)
    batch = made.load(made.train[:8])
    _, counts = head.train().losses(batch)
    _, whole = head.eval().losses(batch)
    assert 0.3 * whole[0][1] < counts[0][1] < 0.7 * whole[0][1]


def test_a_checkpoint_of_a_run_that_began_with_other_heads_is_refused(tmp_path: Path) -> None:
    trainer(EAGLE, tmp_path / "c").save()
    with pytest.raises(HeadError, match="c: was written with init , now it is abc"):
        trainer(EAGLE, tmp_path / "c", init="abc").resume()  # type: ignore[arg-type]


def test_a_checkpoint_of_other_options_is_refused(tmp_path: Path) -> None:
    trainer(EAGLE, tmp_path / "c").save()
    with pytest.raises(HeadError, match="c: was written with seed 1, now it is 9"):
        trainer(EAGLE, tmp_path / "c", seed=9).resume()
    (tmp_path / "c").write_bytes(b"nothing")
    with pytest.raises(HeadError, match="c: not a checkpoint of this run"):
        trainer(EAGLE, tmp_path / "c").resume()


def test_a_loss_that_is_no_number_ends_the_run() -> None:
    made = trainer(EAGLE)
    with torch.no_grad():
        made.head.p("norm").fill_(float("nan"))
    with pytest.raises(HeadError, match="training: the loss is nan at step 0: lower --lr"):
        run([made])


def byte_tokenizer() -> Tokenizer:
    from tokenizers import Tokenizer as HfTokenizer
    from tokenizers import decoders, pre_tokenizers
    from tokenizers.models import BPE

    from mlsdc.runtime.detokenize import byte_of_char

    made = HfTokenizer(BPE(vocab=byte_of_char(), merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return Tokenizer(made, chat_template="{% for m in messages %}<{{ m.content }}>{% endfor %}")


def test_texts_chats_and_completions_by_id_are_read(tmp_path: Path) -> None:
    plain, zipped = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    prompt = {"role": "user", "content": "ask"}
    plain.write_text("\n".join(json.dumps(r) for r in (
        {"text": "hello"}, {"messages": [prompt, {"role": "assistant", "content": "answer"}]}, {"id": 1, "messages": [prompt]})))
    with gzip.open(zipped, "wt") as file:
        file.write(json.dumps({"id": 1, "text": "done"}) + "\n" + json.dumps({"id": 2, "text": "whose?"}) + "\n")
    read = read_samples([plain, zipped], byte_tokenizer(), 100)
    assert [(len(s.tokens), s.start) for s in read] == [(5, 0), (11, 5), (9, 5)]
    assert read_prompts([plain]) == [[prompt]]


@pytest.mark.parametrize(("text", "message"), [
    ("{", "a.jsonl: line 1: not JSON"), ("[1]", "a.jsonl: line 1: expected an object, found list"), ("", "a.jsonl: no text to learn from"),
    ('{"messages": [{"role": "assistant"}]}', "a.jsonl: line 1: not a training record")])
def test_data_that_is_none_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(HeadError, match=message):
        read_samples([tmp_path / "a.jsonl"], byte_tokenizer(), 100)


def finished(folder: Path, config: HeadConfig) -> HeadFile:
    """A file of heads with random weights."""
    tensors = {name: np.random.default_rng(len(name)).standard_normal(shape) for name, shape in config.shapes().items()}
    write_own(folder / "h.safetensors", config, tensors, np.arange(VOCAB), {})
    return read_own(folder / "h.safetensors")


@pytest.mark.parametrize("config", [EAGLE, EAGLE3, MEDUSA], ids=["eagle", "eagle3", "medusa"])
def test_a_run_begins_with_the_weights_of_finished_heads(tmp_path: Path, config: HeadConfig) -> None:
    file, made = finished(tmp_path, config), trainer(config)
    go_on(made.head, file, list(range(VOCAB)))
    for name, value in made.head.tensors().items():
        assert np.array_equal(value.numpy(), file.read(name)), name


def test_heads_of_another_shape_or_vocabulary_are_nothing_to_begin_with(tmp_path: Path) -> None:
    file = finished(tmp_path, EAGLE)
    with pytest.raises(HeadError, match="--init: h.safetensors: intermediate_size is 64, this run's is 128"):
        go_on(trainer(replace(EAGLE, intermediate_size=128)).head, file, list(range(VOCAB)))
    with pytest.raises(HeadError, match="--init: h.safetensors: kind is eagle, this run's is medusa"):
        go_on(trainer(MEDUSA).head, file, list(range(VOCAB)))
    with pytest.raises(HeadError, match="--init: h.safetensors: its draft vocabulary is not that of the other heads"):
        go_on(trainer(EAGLE).head, file, list(range(1, VOCAB + 1)))
