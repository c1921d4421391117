"""The serving half of `mlsdc bench`: serve (HTTP clients), throughput and latency (the engine alone)."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlsdc.runtime.errors import MlsdcError

VERBS = ("serve", "throughput", "latency")
OFF: Mapping[str, Any] = {"speculation": {"enabled": False}}


def add_arguments(parser: argparse.ArgumentParser, numbers: Any) -> None:
    parser.add_argument("--url", metavar="URL", help="serve: a server that runs already, instead of the artifact's own")
    parser.add_argument("--api-key", metavar="KEY", help="serve: for --url")
    parser.add_argument("--peer-url", metavar="URL", help="serve: another server, asked the same in the same rounds")
    parser.add_argument("--model", metavar="NAME", help="serve: the model's name, where a server wants one")
    parser.add_argument("--clients", type=numbers, default=(1, 8), metavar="N[,N]", help="serve: requests at once (1,8)")
    parser.add_argument("--requests", type=int, metavar="N", help="of a round (serve: 2 a client; throughput: 32; latency: 1)")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="serve, throughput, latency: of an answer (64)")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="a prompt a line; spec: JSON lines, with a kind each")
    parser.add_argument("--ignore-eos", action="store_true", help="serve: every answer has --max-tokens tokens, the peer's, too")
    parser.add_argument("--speculation", choices=("on", "off", "both"), default="both", help="serve, throughput, latency")


def main(args: argparse.Namespace, threads: int) -> Any:
    """The report of one of VERBS."""
    if args.max_tokens < 2 or (args.requests is not None and args.requests < 1):
        raise MlsdcError("--max-tokens: at least 2; --requests: at least 1")
    if args.what != "serve":
        return _offline(args, threads)
    from mlsdc.runtime.bench import serve
    from mlsdc.runtime.bench.report import Report
    from mlsdc.runtime.bench.spread import Figure

    if (args.url is None) == (args.artifact is None):
        raise MlsdcError("mlsdc bench serve: expected either an artifact or --url")
    if args.peer and args.peer_url:
        raise MlsdcError("mlsdc bench serve: expected either --peer or --peer-url")
    always = {"ignore_eos": True} if args.ignore_eos else {}
    prompts = _prompts(args.prompts)
    with _server(args, threads) as (url, start_s), _peer(args, threads) as (peer_url, peer_name):
        targets = {}
        for clients in args.clients:
            count = args.requests or 2 * clients
            for mode in ("on", "off") if args.speculation == "both" else (args.speculation,):
                load = serve.Load(clients, count, args.max_tokens, prompts, extra={**always, **(OFF if mode == "off" else {})})
                targets[f"{clients} clients, {mode}"] = (url, load)
            if peer_url:
                targets[f"{clients} clients, peer"] = (peer_url, serve.Load(clients, count, args.max_tokens, prompts, extra=always))
        found = serve.measure(targets, args.rounds, model=args.model, api_key=args.api_key)
    figures = [] if start_s is None else [Figure("start to /ready", "s", (start_s,))]
    for name, rounds in found.items():
        figures += serve.figures(name, rounds)
    for clients in args.clients:
        sides = {mode: found.get(f"{clients} clients, {mode}") for mode in ("on", "off", "peer")}
        for over, under in (("on", "off"), ("on", "peer"), ("off", "peer")):
            left, right = sides[over], sides[under]
            if left and right:
                figures.append(serve.ratio(f"{clients} clients: {over} / {under}", left, right))
    name, sha, target = _about(args)
    return Report("serve", name, sha, target, threads, args.rounds, figures, peer=peer_name)


@contextmanager
def _server(args: argparse.Namespace, threads: int) -> Iterator[tuple[str, float | None]]:
    from mlsdc.runtime.bench.serve import served

    if args.url is not None:
        yield args.url.rstrip("/"), None
        return
    with served(args.artifact, threads=threads) as (url, seconds):
        yield url, seconds


@contextmanager
def _peer(args: argparse.Namespace, threads: int) -> Iterator[tuple[str, str]]:
    """URL and name of the server to compare with, empty without one. A program gets a slot for each client."""
    from mlsdc.runtime.bench.peer import LlamaServer

    if not args.peer:
        yield (args.peer_url or "").rstrip("/"), args.peer_url or ""
        return
    peer = LlamaServer.parse(args.peer, args.peer_model, threads, max(args.clients))
    with peer.served() as (url, _):
        yield url, peer.name


def _offline(args: argparse.Namespace, threads: int) -> Any:
    """All prompts at once (throughput), or one after the other (latency), without a server."""
    from mlsdc.runtime.bench import offline

    if args.artifact is None:
        raise MlsdcError(f"mlsdc bench {args.what}: expected an artifact")
    modes = ("on", "off") if args.speculation == "both" else (args.speculation,)
    return offline.measure(args.what, args.artifact, threads, args.device, _prompts(args.prompts), modes, rounds=args.rounds,
                           requests=args.requests or (32 if args.what == "throughput" else 1), max_tokens=args.max_tokens)


def _prompts(path: Path | None) -> tuple[str, ...]:
    from mlsdc.runtime.bench.serve import PROMPTS

    if path is None:
        return PROMPTS
    try:
        lines = tuple(line for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise MlsdcError(f"--prompts: {path} cannot be read: {error}") from None
    if not lines:
        raise MlsdcError(f"--prompts: {path} has no line with text")
    return lines


def _about(args: argparse.Namespace) -> tuple[str, str, str]:
    from mlsdc.runtime.artifact import Artifact

    if args.artifact is None:
        return args.url, "", "a server"
    artifact = Artifact.open(args.artifact)
    return artifact.root.name, artifact.sha256, artifact.pick_target(args.device).name
