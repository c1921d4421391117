"""`mlsdc train model.yaml --level heads`: options, the run, and what it leaves: the file of heads, and its curves."""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import tempfile
import types
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlsdc.compiler.errors import HeadError

if TYPE_CHECKING:
    from mlsdc.compiler.heads.checkpoint import HeadFile
    from mlsdc.compiler.heads.frozen import FrozenTarget
    from mlsdc.compiler.heads.modules import Head
    from mlsdc.compiler.heads.train import Point, Trainer

NOTED = ("seed", "epochs", "window", "replay", "lr", "unroll", "positions", "soft", "max_tokens", "batch_tokens")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("--level heads")
    group.add_argument("--kind", choices=("eagle", "medusa", "exit"), action="append", help="default eagle; given twice, both learn from "
                       "one pass of the text, and {kind} in -o stands for each")
    group.add_argument("--draft-vocab", type=int, default=8192, metavar="N", help="the most frequent tokens of the text; default 8192")
    group.add_argument("--known-next", action="store_true", help="medusa: heads also see the token the target chose")
    group.add_argument("--num-heads", type=int, default=4, metavar="N", help="medusa: heads; default 4")
    group.add_argument("--intermediate", type=int, metavar="N", help="eagle: width of its MLP; default: the target's")
    group.add_argument("--taps", metavar="A,B,C", help="layers whose outputs it reads; default: the last. Three: EAGLE-3's way")
    group.add_argument("--unroll", type=int, default=3, metavar="N", help="eagle: passes over its own outputs; default 3")
    group.add_argument("--positions", type=float, default=0.5, metavar="X", help="medusa: share of the text learned from; default 0.5")
    group.add_argument("--max-tokens", type=int, default=512, metavar="N", help="longer texts are cut; default 512")
    group.add_argument("--batch-tokens", type=int, default=2048, metavar="N")
    group.add_argument("--epochs", type=int, default=1, metavar="N", help="times the text passes the target")
    group.add_argument("--window", type=int, default=32, metavar="N", help="batches kept in memory")
    group.add_argument("--replay", type=int, default=4, metavar="N", help="optimiser steps for each new batch")
    group.add_argument("--lr", type=float, default=4e-3)
    group.add_argument("--held-out", type=int, default=48, metavar="N", help="texts that acceptance is measured on; default 48")
    group.add_argument("--soft", type=float, default=0.0, metavar="X", help="share of the loss that compares distributions with the "
                       "target's own, instead of first guesses with its text; default 0")
    group.add_argument("--init", metavar="FILE", help="go on from finished heads of the same shape (as -o, {kind} stands for each); their "
                       "draft vocabulary stays")
    group.add_argument("--finish", action="store_true", help="train no further: write the best heads of the run's checkpoint")
    group.add_argument("--device", default="cpu", help="of the target: cpu or cuda; the head is trained on the CPU")


def main(args: argparse.Namespace) -> int:
    import torch

    from mlsdc.compiler.capture import load_source
    from mlsdc.compiler.config import load_config
    from mlsdc.compiler.heads.data import read_samples
    from mlsdc.compiler.heads.frozen import FrozenTarget
    from mlsdc.compiler.heads.modules import make_head
    from mlsdc.compiler.heads.train import Trainer, TrainOptions, run

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    kinds = tuple(dict.fromkeys(args.kind or ("eagle",)))
    if len(kinds) > 1 and "{kind}" not in args.output:
        raise HeadError(f"-o: '{args.output}' is one file for {' and '.join(kinds)}: put {{kind}} into its name")
    if args.held_out < 1:
        raise HeadError(f"--held-out: {args.held_out}, expected at least 1")
    if not 0 <= args.soft <= 1:
        raise HeadError(f"--soft: {args.soft:g}, expected a share from 0 to 1")
    if not Path(args.output).parent.is_dir():
        raise HeadError(f"-o: {args.output}: its folder does not exist")
    stopped = signals()
    config = load_config(args.config)
    source = load_source(config.target.model, config.folder)
    samples = read_samples([Path(path) for path in args.data], open_tokenizer(source), args.max_tokens)
    target = FrozenTarget(source, torch.bfloat16, args.device)
    begun = {kind: beginning(args.init, kind) for kind in kinds} if args.init else {}
    ids = frequent(samples, args.draft_vocab, source.vocab_size)
    if begun:
        ids = begun[kinds[0]].d2t.tolist()
        if max(ids) >= source.vocab_size:
            label = begun[kinds[0]].label
            raise HeadError(f"--init: {label}: drafts token {max(ids)}, the model has {source.vocab_size}: another model's heads")
    draft = torch.full((int(target.embed.shape[0]),), -1)
    draft[torch.tensor(ids)] = torch.arange(len(ids))
    options = TrainOptions(seed=args.seed, epochs=args.epochs, batch_tokens=args.batch_tokens, window=args.window, replay=args.replay,
                           lr=args.lr, soft=args.soft, held_out=args.held_out)
    print(f"{len(samples)} texts, {sum(len(s.tokens) - s.start for s in samples)} tokens to guess, draft vocabulary {len(ids)}", flush=True)
    trainers, outputs = [], []
    for kind in kinds:
        head_config = make_config(args, kind, target, len(ids))
        extra = {"unroll": args.unroll} if kind == "eagle" else {"share": args.positions}
        head = make_head(head_config, target.lend(torch.tensor(ids)), seed=args.seed, **extra)
        if kind in begun:
            go_on(head, begun[kind], ids)
        outputs.append(Path(args.output.replace("{kind}", kind)))
        checkpoint = outputs[-1].with_suffix(".checkpoint")
        begins = replace(options, init=digest(args.init, kind)) if args.init else options
        trainer = Trainer(head, target, head_config.taps, samples, draft, begins, checkpoint, partial(tell, kind))
        print(f"{kind}: {sum(p.numel() for p in head.parameters()) / 1e6:.2f} M numbers, {len(trainer.plan)} batches", flush=True)
        if trainer.resume(window=not args.finish):
            print(f"{kind}: resumed at batch {trainer.streamed} of {len(trainer.plan)}", flush=True)
        elif kind in begun and not args.finish:
            trainer.measure()  # what is kept in the end must be better than what it began with
        trainers.append(trainer)
    if len({trainer.taps for trainer in trainers}) > 1:
        raise HeadError("--kind: heads that read different layers cannot learn from one pass; train them one after the other")
    if args.finish and not all(trainer.best for trainer in trainers):
        raise HeadError("--finish: there is no checkpoint with measured heads yet; train on")
    if not args.finish and not run(trainers, stopped):
        print("stopped; the same command goes on from here", flush=True)
        return 130
    for output, trainer in zip(outputs, trainers, strict=True):
        write(args, output, trainer, ids)
    return 0


def beginning(path: str, kind: str) -> HeadFile:
    """The finished heads that `--init` names. Raises HeadError."""
    from mlsdc.compiler.heads.checkpoint import read_own

    return read_own(init_file(path, kind))


def init_file(path: str, kind: str) -> Path:
    return Path(path.replace("{kind}", kind))


def digest(path: str, kind: str) -> str:
    return hashlib.sha256(init_file(path, kind).read_bytes()).hexdigest()


def go_on(head: Head, file: HeadFile, ids: list[int]) -> None:
    """Give a head the weights of finished ones. Raises HeadError for those of another shape."""
    import torch

    wanted, found = asdict(head.config), asdict(file.config)
    for key in ("kind", *wanted):
        if found.get(key) != wanted[key]:
            raise HeadError(f"--init: {file.label}: {key} is {found.get(key)}, this run's is {wanted[key]}")
    if file.d2t.tolist() != ids:
        raise HeadError(f"--init: {file.label}: its draft vocabulary is not that of the other heads")
    head.begin_with({name: torch.from_numpy(file.read(name)) for name in file.names()})


def write(args: argparse.Namespace, output: Path, trainer: Trainer, ids: list[int]) -> None:
    import numpy as np

    from mlsdc.compiler.heads.checkpoint import write_own

    best = max(trainer.curve, key=lambda point: point.length)
    notes = {
        "data": ", ".join(Path(path).name for path in args.data), "batches": f"{trainer.streamed} of {len(trainer.plan)}",
        "tokens": str(trainer.tokens), "acceptance": json.dumps(best.acceptance), **{name: str(getattr(args, name)) for name in NOTED}}
    if args.init:
        notes["init"] = Path(args.init).name
    write_own(output, trainer.head.config, {name: value.numpy() for name, value in trainer.best.items()}, np.array(ids, np.int32), notes)
    curve = output.with_suffix(".curve.json")
    curve.write_text(json.dumps([asdict(point) for point in trainer.curve], indent=1) + "\n")
    drawn = draw(trainer.curve, output.with_suffix(".png"))
    output.with_suffix(".checkpoint").unlink(missing_ok=True)
    print(f"{output} ({output.stat().st_size / 1e6:.2f} MB), {curve.name}{', ' + drawn if drawn else ''}", flush=True)


def tell(kind: str, point: Point) -> None:
    rates = " ".join(f"{rate:.3f}" for rate in point.acceptance)
    print(f"{kind:6}  batch {point.streamed:4}  {point.tokens:7} tokens  {point.seconds:6.0f} s  loss {point.loss:.3f}  "
          f"held-out acceptance {rates}  chain {point.length:.3f}", flush=True)


def draw(curve: list[Point], path: Path) -> str:
    """Loss and acceptance as a PNG; says so where matplotlib is not installed."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return "no PNG: pip install matplotlib"
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2))
    tokens = [point.tokens for point in curve]
    left.plot(tokens, [point.loss for point in curve])
    left.set(xlabel="tokens", ylabel="training loss")
    for depth in range(len(curve[0].acceptance)):
        right.plot(tokens, [point.acceptance[depth] for point in curve], label=f"depth {depth + 1}")
    right.set(xlabel="tokens", ylabel="held-out acceptance", ylim=(0, 1))
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
    return path.name


def signals() -> Callable[[], bool]:
    """From now on Ctrl-C and SIGTERM ask for a stop at the next batch; whether one did."""
    stopped: list[int] = []

    def stop(number: int, frame: types.FrameType | None) -> None:
        stopped.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    return lambda: bool(stopped)


def make_config(args: argparse.Namespace, kind: str, target: FrozenTarget, draft_vocab: int) -> Any:
    from mlsdc.compiler.heads.config import EagleConfig, MedusaConfig

    c = target.config
    hidden, vocab = int(c.hidden_size), int(target.embed.shape[0])
    taps = parse_taps(args.taps, target.layers)
    if kind == "exit":
        if len(taps) != 1 or taps[0] == target.layers:
            raise HeadError(f"--taps: '{args.taps}', an exit stands after one layer before the last, e.g. {target.layers // 3}")
        return MedusaConfig(hidden, hidden, vocab, draft_vocab, 1, target.eps, taps, first=1, own_norm=True, kind="exit")
    if kind == "medusa":
        if args.num_heads < 1:
            raise HeadError(f"--num-heads: {args.num_heads}, expected at least 1")
        return MedusaConfig(hidden, hidden, vocab, draft_vocab, args.num_heads, target.eps, (target.layers,), known_next=args.known_next)
    theta = c.rope_parameters.get("rope_theta", 10000.0) if isinstance(c.rope_parameters, Mapping) else 10000.0
    return EagleConfig(
        hidden, hidden, vocab, draft_vocab, taps, int(c.num_attention_heads), int(c.num_key_value_heads),
        int(getattr(c, "head_dim", None) or hidden // c.num_attention_heads), args.intermediate or int(c.intermediate_size), target.eps,
        float(theta), style="eagle3" if len(taps) > 1 else "fused")


def parse_taps(text: str | None, layers: int) -> tuple[int, ...]:
    """`2,15,27`: numbers of layers passed, rising, at most all of them. Raises HeadError."""
    if text is None:
        return (layers,)
    try:
        taps = tuple(int(part) for part in text.split(","))
    except ValueError:
        taps = ()
    if not taps or list(taps) != sorted(set(taps)) or taps[0] < 1 or taps[-1] > layers:
        raise HeadError(f"--taps: '{text}', expected rising numbers of layers from 1 to {layers}, e.g. 2,{layers // 2},{layers - 3}")
    return taps


def frequent(samples: Any, size: int, vocab: int) -> list[int]:
    """The `size` most frequent tokens of the target's own text, filled up with the lowest ids, rising."""
    if not 32 <= size <= vocab:
        raise HeadError(f"--draft-vocab: {size}, expected 32 to {vocab}")
    counts: Counter[int] = Counter()
    for sample in samples:
        counts.update(sample.tokens[sample.start :])
    size = size // 16 * 16  # whole blocks of the kernels
    common = [token for token, _ in counts.most_common(size) if token < vocab]
    rest = (token for token in range(vocab) if token not in counts)
    return sorted([*common, *(next(rest) for _ in range(size - len(common)))])


def open_tokenizer(source: Any) -> Any:
    from mlsdc.runtime.tokenizer import Tokenizer

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tokenizer.json").write_text(source.tokenizer_json, encoding="utf-8")
        template = Path(folder) / "chat_template.jinja"
        if source.chat_template:
            template.write_text(source.chat_template, encoding="utf-8")
        eos = source.eos_token_ids[0] if source.eos_token_ids else None
        return Tokenizer.open(Path(folder) / "tokenizer.json", template if source.chat_template else None,
                              bos_token_id=source.bos_token_id, eos_token_id=eos)
