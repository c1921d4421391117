"""A load that looks for wrong texts and lost pages: many short requests in a pool that is too small, a third of them aborted.

    python -m mlsdc.runtime.bench.load build/smollm2.mlsdc --requests 2000

Prompts share beginnings, lengths are mixed, every request asks for its own number of tokens, every other prompt is sampled with a seed of
its own, speculation is on. What a request brought, aborted or not, must be the beginning of what its prompt brings alone without
speculation; at the end every page must be free or cached.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from mlsdc.runtime.engine import Engine
from mlsdc.runtime.errors import MlsdcError
from mlsdc.runtime.request import Request
from mlsdc.runtime.sampling_params import SamplingParams, Speculation
from mlsdc.runtime.statistics import Statistics

SUBJECTS = ("rain", "bread", "a lighthouse", "tax forms", "owls", "the number seven", "old maps", "a slow train", "salt", "chess")
TASKS = (
    "Write one sentence about {}.", "List three words that go with {}.", "Repeat after me, twice: {}, {}, {}.",
    "You are a careful editor. Keep every word and put a full stop at the end: I never thought much about {} until that day", "{}?",
)
QUEUED = 24  # requests submitted and not finished, at most


@dataclass(frozen=True)
class LoadReport:
    """`owned` are pages that sequences hold in a step, as a share of the pool, while a request waits for room. `rss` in MiB."""

    requests: int
    aborted: int
    wrong: int
    leaked_pages: int
    steps: int
    tokens: int
    preemptions: int
    cached_tokens: int
    drafted: int
    accepted: int
    acceptance_first: float
    acceptance_last: float
    owned_mean: float
    owned_max: float
    rss_quarter: float
    rss_end: float
    seconds: float


def prompts(engine: Engine) -> list[list[int]]:
    """Token ids of short chats, some with a long shared beginning."""
    assert engine.tokenizer is not None
    system = {"role": "system", "content": "You are a helpful assistant who answers briefly. " * 6}
    texts = [task.replace("{}", subject) for subject in SUBJECTS for task in TASKS]
    chats = [([system] if i % 3 == 0 else []) + [{"role": "user", "content": text}] for i, text in enumerate(texts)]
    return [engine.tokenizer.chat(chat) for chat in chats]


def params_of(i: int, max_tokens: int, temperature: float, speculation: Speculation | None = None) -> SamplingParams:
    """Every other prompt is sampled, if `temperature` is not 0."""
    return SamplingParams(
        max_tokens=max_tokens, temperature=temperature if i % 2 else 0.0, seed=i, ignore_eos=True, speculation=speculation)


def solo_runs(engine: Engine, prompts: Sequence[list[int]], max_tokens: int, temperature: float) -> list[list[int]]:
    """What each prompt brings alone, without speculation."""
    off = Speculation(enabled=False)
    return [engine.generate([prompt], params_of(i, max_tokens, temperature, off))[0].token_ids for i, prompt in enumerate(prompts)]


def run_load(engine: Engine, prompts: Sequence[list[int]], solo: Sequence[list[int]], num_requests: int, *, temperature: float = 0.0,
             seed: int = 0) -> LoadReport:
    """Serve `num_requests` of the prompts on an idle engine; `solo` are their texts alone. Raises CapacityError if a page is lost."""
    rng = random.Random(seed)
    listener: deque[Request] = deque()
    live: dict[Request, int] = {}
    drafts: list[tuple[int, int]] = []  # of each request that ended: drafted, accepted; what the report needs is kept, and no more
    total = Statistics()
    wrong = aborted = submitted = steps = 0
    ended: Counter[str] = Counter()
    owned = [0, 0.0, 0.0]  # steps in which a request waited, the sum of what was owned then, and the most
    rss_quarter = 0.0
    pool = engine.pool
    forward = engine._forward.run

    def watched() -> None:
        if engine.scheduler.waiting:
            share = 1 - pool.num_available / pool.num_pages
            owned[:] = owned[0] + 1, owned[1] + share, max(owned[2], share)
        forward()

    engine._forward.run = watched  # type: ignore[method-assign]
    start = time.perf_counter()
    while submitted < num_requests or live:
        while submitted < num_requests and len(live) < QUEUED:
            i = rng.randrange(len(prompts))
            params = params_of(i, rng.randint(1, len(solo[i])), temperature)
            live[engine.submit(prompts[i], params, priority=rng.randint(0, 1), listener=listener)] = i
            submitted += 1
        if aborted < 0.3 * submitted and live and rng.random() < 0.5:  # at any moment of a request's life
            engine.abort(rng.choice(list(live)))
            aborted += 1
        engine.step()
        steps += 1
        if steps % 20 == 0:
            engine.check_integrity()
        while listener:
            request = listener.popleft()
            if request.finished and request in live:
                i = live.pop(request)
                output = request.output
                cut = request.finish_reason == "length" and len(output) != request.params.max_tokens
                wrong += cut or output != solo[i][: len(output)]
                ended[request.finish_reason or ""] += 1
                drafts.append((request.statistics.drafted, request.statistics.accepted))
                total.merge(request.statistics)
        if not rss_quarter and len(drafts) >= num_requests // 4:
            rss_quarter = _rss_mib()
    while engine.step():
        pass
    engine._forward.run = forward  # type: ignore[method-assign]
    engine.check_integrity()
    tenth = max(1, len(drafts) // 10)
    return LoadReport(
        requests=len(drafts), aborted=ended["abort"], wrong=wrong, leaked_pages=pool.num_pages - pool.num_available, steps=steps,
        tokens=total.tokens, preemptions=total.preemptions, cached_tokens=total.cached_tokens, drafted=total.drafted,
        accepted=total.accepted, acceptance_first=_acceptance(drafts[:tenth]), acceptance_last=_acceptance(drafts[-tenth:]),
        owned_mean=owned[1] / max(1, owned[0]), owned_max=owned[2], rss_quarter=rss_quarter, rss_end=_rss_mib(),
        seconds=time.perf_counter() - start)


def _acceptance(drafts: Sequence[tuple[int, int]]) -> float:
    drafted, accepted = map(sum, zip(*drafts, strict=True))
    return accepted / drafted if drafted else 0.0


def _rss_mib() -> float:
    """Resident memory of this process; 0 where the system does not say."""
    import os

    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except OSError:
        return 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description="Serve many requests in a small pool; look for wrong texts and lost pages.")
    parser.add_argument("artifact")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--pages", type=int, default=20, help="of the pool; small, so that it is full and requests are preempted")
    parser.add_argument("--max-num-seqs", type=int, help="at once; among few, drafts pay and more of them are sent")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--temperature", type=float, default=0.8, help="of every other prompt")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    try:
        with Engine.load(args.artifact, threads=args.threads, num_pages=args.pages) as engine:
            engine.scheduler.restrict(max_num_seqs=args.max_num_seqs)
            asked = prompts(engine)
            solo = solo_runs(engine, asked, args.max_tokens, args.temperature)
            report = run_load(engine, asked, solo, args.requests, temperature=args.temperature)
    except MlsdcError as error:
        print(f"{type(error).__name__}: {error}")
        return 1
    for name, value in asdict(report).items():
        print(f"{name:18} {value:.3f}" if isinstance(value, float) else f"{name:18} {value}")
    return int(bool(report.wrong or report.leaked_pages))


if __name__ == "__main__":
    raise SystemExit(main())
