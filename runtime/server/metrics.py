"""Prometheus metrics under `mlsdc:`, with vLLM's names where vLLM has them. One registry per app.

Counters of a request are brought up to date while it streams and when it ends. Gauges read the engine when they are scraped.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from mlsdc.runtime.request import Request
from mlsdc.runtime.server.overview import Recent

if TYPE_CHECKING:
    from mlsdc.runtime.engine import Engine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
ITL = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
E2E = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0)
STEP = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
HOST = (0.00005, 0.0001, 0.00015, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)
TOKENS = tuple(float(1 << i) for i in range(18))


class Metrics:
    """All metrics of one server."""

    def __init__(self, engine: Engine, model: str) -> None:
        self.registry = registry = CollectorRegistry(auto_describe=False)
        self._engine = engine
        self._model = model

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"mlsdc:{name}", text, ["model_name"], registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"mlsdc:{name}", text, ["model_name", *labels], registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"mlsdc:{name}", text, ["model_name"], buckets=buckets, registry=registry)

        self.recent_ttft, self.recent_itl = Recent(), Recent()  # for the status page
        self.tokens_seen = 0
        pool, scheduler = engine.pool, engine.scheduler
        for name, text, read in (
            ("num_requests_running", "Choices that have pages.", lambda: len(scheduler.running)),
            ("num_requests_waiting", "Choices that wait for pages or a place.", lambda: len(scheduler.waiting)),
            ("kv_cache_usage_perc", "Share of the pages that sequences own, 0 to 1.", lambda: 1 - pool.num_available / pool.num_pages),
            ("engine_alive", "1 while the engine serves, 0 after a step broke or hung.", lambda: float(engine.alive)),
            ("step_age_seconds", "How long the running step has been running; 0 between steps.", lambda: engine.step_age_s),
        ):
            gauge(name, text).labels(model).set_function(read)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens.").labels(model)
        self.generation_tokens = counter("generation_tokens", "Tokens that were committed.").labels(model)
        self.prefix_queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.").labels(model)
        self.prefix_hits = counter("prefix_cache_hits", "Prompt tokens found there.").labels(model)
        self.preemptions = counter("num_preemptions", "Times a sequence gave its pages back.").labels(model)
        self.success = counter("request_success", "Choices that ended, by reason.", "finished_reason")
        self.refused = counter("request_refused", "Requests that were not taken, by HTTP status.", "status")
        self.refused.labels(model, "429")  # there from the start: a series that begins with its first event has no rate then
        for reason in ("stop", "length", "abort", "error"):
            self.success.labels(model, reason)
        self.steps = counter("spec_decode_num_steps", "Target steps of choices past their prompt.").labels(model)
        self.drafts = counter("spec_decode_num_drafts", "Steps that sent a level's nodes.", "level")
        self.draft_tokens = counter("spec_decode_num_draft_tokens", "Nodes sent to be verified.", "level")
        self.accepted_tokens = counter("spec_decode_num_accepted_tokens", "Nodes committed; no bonus tokens.", "level")
        self.offered_at = counter("spec_decode_num_drafts_per_pos", "Steps that offered a node at this depth.", "level", "position")
        self.accepted_at = counter("spec_decode_num_accepted_tokens_per_pos", "Steps that accepted one there.", "level", "position")
        self.ttft = histogram("time_to_first_token_seconds", "From arrival to the first token.", TTFT).labels(model)
        self.itl = histogram(
            "inter_token_latency_seconds", "Between tokens; a step's tokens share its time equally.", ITL).labels(model)
        self.tpot = histogram("request_time_per_output_token_seconds", "Per request, after the first token.", ITL).labels(model)
        self.e2e = histogram("e2e_request_latency_seconds", "From arrival to the last token.", E2E).labels(model)
        self.queue_time = histogram("request_queue_time_seconds", "From arrival to a place in a step.", TTFT).labels(model)
        self.prompt_length = histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKENS).labels(model)
        self.output_length = histogram("request_generation_tokens", "Tokens of a choice.", TOKENS).labels(model)
        self.step_time = histogram("step_seconds", "A step, host and device.", STEP).labels(model)
        self.host_time = histogram("step_host_seconds", "A step without the time in the device's programs.", HOST).labels(model)

    def page(self) -> bytes:
        """The text of /metrics."""
        return generate_latest(self.registry)

    def step(self, seconds: float, host_seconds: float) -> None:
        """Called by the engine after each step."""
        self.step_time.observe(seconds)
        self.host_time.observe(host_seconds)


class ChoiceMeter:
    """What one choice of a request has already put into the metrics."""

    EVERY_S = 1.0

    def __init__(self, metrics: Metrics, request: Request) -> None:
        self.metrics = metrics
        self.request = request
        self._model = metrics._model
        self._last: float | None = None  # when its last tokens came
        self._flushed = request.timings.submitted
        self._tokens = self._cached = self._steps = self._preemptions = 0
        self._levels: dict[str, tuple[int, int, list[int], list[int]]] = {}
        self._started = self._ended = False

    def tokens(self, count: int) -> None:
        """`count` tokens came in one burst: each of them took its share of the time since the last one."""
        now = time.perf_counter()
        self.metrics.tokens_seen += count
        if self._last is None:
            self.metrics.ttft.observe(now - self.request.timings.submitted)
            self.metrics.recent_ttft.add(now - self.request.timings.submitted)
            count -= 1
            share = 0.0
        else:
            share = (now - self._last) / count
        for _ in range(count):
            self.metrics.itl.observe(share)
            self.metrics.recent_itl.add(share)
        self._last = now
        if now - self._flushed >= self.EVERY_S:
            self.flush(now)

    def flush(self, now: float) -> None:
        """Bring the counters up to what the request's statistics say."""
        self._flushed = now
        m, request, statistics = self.metrics, self.request, self.request.statistics
        if not self._started and request.timings.admitted is not None:
            self._started = True
            m.queue_time.observe(request.timings.admitted - request.timings.submitted)
            if request.parent is None:
                m.prompt_tokens.inc(request.num_prompt)
                m.prompt_length.observe(request.num_prompt)
                m.prefix_queries.inc(request.num_prompt)
        tokens, cached, steps, preemptions = request.num_output, statistics.cached_tokens, statistics.steps, statistics.preemptions
        m.generation_tokens.inc(tokens - self._tokens)
        if request.parent is None and not self._preemptions and not preemptions:  # what a preempted request finds again is its own
            m.prefix_hits.inc(cached - self._cached)
        m.steps.inc(steps - self._steps)
        m.preemptions.inc(preemptions - self._preemptions)
        self._tokens, self._cached, self._steps, self._preemptions = tokens, cached, steps, preemptions
        for name, level in list(statistics.levels.items()):
            self._flush_level(name, level.drafted, level.accepted, [(d.offered, d.accepted) for d in list(level.depths)])

    def _flush_level(self, name: str, drafted: int, accepted: int, depths: list[tuple[int, int]]) -> None:
        m, model = self.metrics, self._model
        old_drafted, old_accepted, offered_at, accepted_at = self._levels.get(name, (0, 0, [], []))
        m.draft_tokens.labels(model, name).inc(drafted - old_drafted)
        m.accepted_tokens.labels(model, name).inc(accepted - old_accepted)
        for depth, (offered, hit) in enumerate(depths):
            if depth == len(offered_at):
                offered_at.append(0)
                accepted_at.append(0)
            m.offered_at.labels(model, name, str(depth)).inc(offered - offered_at[depth])
            m.accepted_at.labels(model, name, str(depth)).inc(hit - accepted_at[depth])
            if depth == 0:
                m.drafts.labels(model, name).inc(offered - offered_at[0])
            offered_at[depth], accepted_at[depth] = offered, hit
        self._levels[name] = (drafted, accepted, offered_at, accepted_at)

    def end(self, reason: str) -> None:
        """The choice has ended, or nobody waits for it any more. Once."""
        if self._ended:
            return
        self._ended = True
        now = time.perf_counter()
        self.flush(now)
        m, timings, tokens = self.metrics, self.request.timings, self.request.num_output
        m.success.labels(self._model, reason).inc()
        m.e2e.observe(now - timings.submitted)
        m.output_length.observe(tokens)
        if tokens > 1 and timings.first_token is not None and timings.finished is not None:
            m.tpot.observe((timings.finished - timings.first_token) / (tokens - 1))
