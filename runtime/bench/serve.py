"""`mlsdc bench serve`: clients that ask as soon as they are answered, against a server's HTTP API, ours or another of its kind."""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlsdc.runtime.bench.client import Answer, stream_chat
from mlsdc.runtime.bench.process import serving
from mlsdc.runtime.bench.spread import Figure, by_round
from mlsdc.runtime.errors import MlsdcError

PROMPTS = (
    "Name three colours and say what each is used for.", "Write a short story about a dog that finds a key.",
    "Explain what a hash table is, with an example.", "List the months of the year with their number of days.",
    "Write a Python function that returns the n-th Fibonacci number, and explain it line by line.",
    "Give me a recipe for pancakes: ingredients, then steps.", "Why is the sky blue? Answer for a child.",
    "Repeat this table as JSON, then as CSV: name=Ann age=31 city=Oslo; name=Bob age=27 city=Rome; name=Eve age=45 city=Kyiv.",
    "Write a letter to a neighbour about a lost parcel.", "What are the planets of the solar system, in order?",
    "Summarise in one sentence, then in three: bread is made of flour, water, salt and yeast; it is kneaded, left to rise, and baked.",
    "Write a SQL query that counts orders per customer in 2024, and explain each clause.", "Compare cats and dogs as pets, in five points.",
    "Translate into French and back: the train leaves at noon.", "Write a poem of eight lines about the sea.",
    "Count from 1 to 40 in words.",
)
SHARES = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class Load:
    """What each round asks: `requests` chats by `clients` at once, of `max_tokens` each."""

    clients: int
    requests: int
    max_tokens: int
    prompts: Sequence[str] = PROMPTS
    temperature: float = 0.0
    extra: Mapping[str, Any] | None = None  # fields of the body that only some servers know

    def body(self, prompt: str, model: str | None) -> dict[str, Any]:
        named = {"model": model} if model else {}
        return {**named, "messages": [{"role": "user", "content": prompt}], "max_tokens": self.max_tokens,
                "temperature": self.temperature, **(self.extra or {})}


@dataclass(frozen=True)
class Round:
    """What one round brought."""

    answers: Sequence[Answer]
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return sum(answer.tokens for answer in self.answers) / self.seconds

    def values(self, name: str) -> list[float]:
        """Sorted milliseconds of `ttft`, `itl`, `tpot` or `e2e`."""
        of: dict[str, Callable[[Answer], list[float]]] = {
            "ttft": lambda answer: [answer.first_s], "e2e": lambda answer: [answer.total_s], "itl": Answer.gaps_s,
            "tpot": lambda answer: [] if answer.per_token_s is None else [answer.per_token_s]}
        return sorted(1e3 * value for answer in self.answers for value in of[name](answer))

    def speculation(self) -> Mapping[str, Any] | None:
        """Our servers' figures of all answers together."""
        found = [answer.usage["speculation"] for answer in self.answers if answer.usage and "speculation" in answer.usage]
        if not found:
            return None
        levels: dict[str, dict[str, Any]] = {}
        for name, level in ((name, level) for one in found for name, level in one["levels"].items()):
            mine = levels.setdefault(name, {"drafted": 0, "accepted": 0, "per_position": []})
            mine["drafted"] += level["drafted"]
            mine["accepted"] += level["accepted"]
            for at, place in enumerate(level["per_position"]):
                if at == len(mine["per_position"]):
                    mine["per_position"].append({"offered": 0, "accepted": 0})
                for key, value in place.items():
                    mine["per_position"][at][key] += value
        total = {name: sum(one[name] for one in found) for name in ("steps", "drafted", "accepted")}
        return {**total, "acceptance_length": 1 + total["accepted"] / total["steps"] if total["steps"] else 0.0, "levels": levels}


def percentile(values: Sequence[float], share: float) -> float:
    """Of sorted values: the smallest that at least `share` of them do not exceed; 0 if there are none."""
    return values[max(0, min(len(values) - 1, -int(-share * len(values) // 1) - 1))] if values else 0.0


async def run_round(url: str, load: Load, *, model: str | None = None, api_key: str | None = None, offset: int = 0) -> Round:
    """Raises MlsdcError if any answer fails."""
    prompts = itertools.islice(itertools.cycle(load.prompts), offset, offset + load.requests)
    left = iter(list(prompts))
    answers: list[Answer] = []

    async def client() -> None:
        for prompt in left:
            answer = await stream_chat(url, load.body(prompt, model), api_key=api_key)
            if not answer.arrivals:
                raise MlsdcError(f"{url}: an answer without tokens")
            answers.append(answer)

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(load.clients)))
    return Round(answers, time.perf_counter() - start)


def measure(targets: Mapping[str, tuple[str, Load]], rounds: int, *, model: str | None = None, api_key: str | None = None
            ) -> dict[str, list[Round]]:
    """`rounds` interleaved rounds of every target (name -> URL and load), after one that is thrown away."""
    found: dict[str, list[Round]] = {name: [] for name in targets}
    for turn in range(rounds + 1):
        for name, (url, load) in targets.items():
            result = asyncio.run(run_round(url, load, model=model, api_key=api_key, offset=turn * load.requests))
            if turn:
                found[name].append(result)
    return found


def figures(name: str, rounds: Sequence[Round]) -> Iterator[Figure]:
    """A target's figures, a value a round."""
    tokens = sum(answer.tokens for one in rounds for answer in one.answers)
    yield Figure(f"{name}: output", "tokens/s", tuple(one.tokens_per_s for one in rounds), f"{tokens} tokens in all")
    for kind in ("ttft", "itl", "tpot", "e2e"):
        for share in SHARES:
            yield Figure(f"{name}: {kind} p{share * 100:g}", "ms", tuple(percentile(one.values(kind), share) for one in rounds))
    drafted = [one.speculation() for one in rounds]
    if any(one and one["drafted"] for one in drafted):
        yield Figure(f"{name}: tokens a step", "", tuple(one["acceptance_length"] if one else 0.0 for one in drafted), "bonus included")
        for level in sorted({level for one in drafted if one for level in one["levels"]}):
            rates = tuple(_rate(one, level) for one in drafted)
            yield Figure(f"{name}: {level} accepted", "x", rates, "of drafted nodes")


def ratio(name: str, over: Sequence[Round], under: Sequence[Round]) -> Figure:
    return Figure(name, "x", by_round([one.tokens_per_s for one in over], [one.tokens_per_s for one in under]), "tokens/s, round by round")


def _rate(one: Mapping[str, Any] | None, level: str) -> float:
    found = one["levels"].get(level) if one else None
    return found["accepted"] / found["drafted"] if found and found["drafted"] else 0.0


def served(artifact: Path, *, threads: int | None, options: Sequence[str] = ()) -> AbstractContextManager[tuple[str, float]]:
    """`mlsdc serve` in a process of its own: (URL, seconds until /ready answered). Raises MlsdcError."""
    command = [sys.executable, "-m", "mlsdc.compiler.cli", "serve", str(artifact), "--log-level", "error", *options]
    return serving([*command, *(["--threads", str(threads)] if threads else [])], name="mlsdc serve", ready="/ready")
