"""What a KV-cache format costs: perplexity, KL divergence and top-1 agreement against the 16-bit cache, bits an element, tokens a second.

    mlsdc eval m.mlsdc                             # the artifact's own format
    mlsdc eval m.mlsdc --kv bf16,int8,int4         # its siblings, compiled from the config it remembers
    mlsdc eval m.mlsdc --kv "{dtype: int4, page_size: 64}" --kv int8
    mlsdc eval a.mlsdc b.mlsdc c.mlsdc             # artifacts that are there already

The reference is the bf16 cache with the same weights, in another engine: bf16 itself must come out with a KL of exactly 0. The text is
`pydoc_data.topics`, which comes with Python, unless --text names another. Text is scored in windows from an empty cache.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlsdc.runtime.errors import MlsdcError

if TYPE_CHECKING:
    from mlsdc.runtime.artifact import Artifact

REFERENCE = "bf16"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifacts", nargs="+", metavar="artifact", type=Path)
    parser.add_argument("--kv", action="append", default=[], metavar="FORMAT[,..]",
                        help="formats to compile the first artifact for, or one {as target.kv of model.yaml has it}; may be repeated")
    parser.add_argument("--text", metavar="FILE", help="UTF-8 text to score (default: Python's own manual of topics)")
    parser.add_argument("--tokens", type=int, default=8192, metavar="N", help="of the text, from its beginning (8192)")
    parser.add_argument("--window", type=int, default=2048, metavar="N", help="tokens scored from one empty cache (2048)")
    parser.add_argument("--threads", type=int, metavar="N", help="default: all cores this process may use")
    parser.add_argument("--model", metavar="PATH", help="the checkpoint, where the artifact's own note of it does not lead there")
    parser.add_argument("--keep", metavar="DIR", type=Path, help="leave the compiled artifacts there")
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON, too; - prints it instead of the table")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw bits against KL and perplexity (.png, .svg, .pdf): mlsdc[plot]")


def main(args: argparse.Namespace) -> int:
    from mlsdc.runtime.artifact import Artifact
    from mlsdc.runtime.bench.quality import Scored, describe_text, evaluate, table, to_json

    if args.tokens < 2 or args.window < 2:
        raise MlsdcError("--tokens and --window: at least 2, a row and the token after it")
    text = read_text(args.text)
    given = [Artifact.open(path) for path in args.artifacts]
    check_window(given, args.window)
    with ExitStack() as stack:
        folder = made(args.keep) if args.keep else Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mlsdc-eval-")))
        paths = list(compiled(given, list(wanted_formats(args.kv)), folder, args.model))
        scored = [stack.enter_context(closing(Scored(path, name=name, threads=args.threads))) for name, path in paths]
        reference, others = scored[0], scored[1:]
        if reference.engine.tokenizer is None:
            raise MlsdcError(f"{reference.path.name}: has no tokenizer")
        tokens = reference.engine.tokenizer.encode(text[: 16 * args.tokens])[: args.tokens]
        if len(tokens) < 2:
            raise MlsdcError(f"--text: {len(tokens)} tokens, expected at least 2")
        found = evaluate(reference, others, tokens, args.window)
    what = {"text": args.text or "pydoc_data.topics", **describe_text(text), "tokens": len(tokens), "window": args.window,
            "reference": reference.sha256}
    if args.plot:
        from mlsdc.compiler.plot import draw_quality

        draw_quality(found, args.plot)
    if args.json:
        write_json(args.json, {**what, "formats": to_json(found)})
    if args.json != "-":
        print(", ".join(f"{name} {value}" for name, value in what.items() if name != "reference"))
        print("\n".join(table(found)))
    return 0


def made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MlsdcError(f"--keep: {folder} cannot be made: {error.strerror}") from None
    return folder


def read_text(name: str | None) -> str:
    from mlsdc.runtime.bench.quality import evaluation_text

    if name is None:
        return evaluation_text()
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MlsdcError(f"--text: {name} cannot be read ({getattr(error, 'strerror', None) or 'not UTF-8 text'})") from None


def check_window(artifacts: Sequence[Artifact], window: int) -> None:
    for artifact in artifacts:
        most = artifact.manifest.limits.max_model_len
        if window > most:
            raise MlsdcError(f"--window: {window}, but {artifact.root.name} was compiled for {most} tokens (limits.max_model_len)")


def wanted_formats(texts: Sequence[str]) -> Iterator[Any]:
    """What target.kv is to be: each a format's name or a mapping."""
    import yaml

    for text in texts:
        if not text.lstrip().startswith("{"):
            yield from (name.strip() for name in text.split(","))
            continue
        try:
            yield yaml.safe_load(text)
        except yaml.YAMLError:
            raise MlsdcError(f"--kv: {text} is not a mapping, e.g. {{dtype: int4, page_size: 64}}") from None


def compiled(given: Sequence[Artifact], formats: Sequence[Any], folder: Path, model: str | None) -> Iterator[tuple[str, Path]]:
    """(name, artifact) of the reference and then of every row of the table; what is not given is compiled into `folder`."""
    from mlsdc.runtime.bench.quality import kv_name

    names = [kv_name(artifact.manifest) for artifact in given]
    known = [artifact for artifact, name in zip(given, names, strict=True) if name == REFERENCE]
    reference = known[0].root if known else compile_sibling(given[0], REFERENCE, folder, model)
    yield REFERENCE, reference
    for artifact, name in zip(given, names, strict=True):
        if not formats or len(given) > 1:
            yield name if names.count(name) == 1 else f"{name} {artifact.root.name}", artifact.root
    for kv in formats:
        yield show(kv), reference if kv == REFERENCE else compile_sibling(given[0], kv, folder, model)


def show(kv: Any) -> str:
    return " ".join(str(value) for value in kv.values()) if isinstance(kv, dict) else str(kv)


def compile_sibling(artifact: Artifact, kv: Any, folder: Path, model: str | None) -> Path:
    """The artifact with another cache format, from the compile cache if it is there."""
    from mlsdc.compiler.cli_compile import compile_or_fetch
    from mlsdc.compiler.config_record import read_record

    config = read_record(artifact, model=model, changes={"kv": kv}, cascade=False)
    output = folder / f"{show(kv).replace(' ', '-').replace('/', '-')}.mlsdc"
    compile_or_fetch(config, output)
    return output


def write_json(name: str, found: dict[str, Any]) -> None:
    text = json.dumps(found, indent=1) + "\n"
    if name == "-":
        sys.stdout.write(text)
        return
    try:
        Path(name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise MlsdcError(f"--json: {name} cannot be written: {error.strerror}") from None
