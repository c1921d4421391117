"""The engine: `step()` is schedule -> draft -> verify -> commit; the rest is getting requests in and tokens out.

Any number of threads may call `submit`, `abort`, `generate` and `stream` at once. There is no engine thread: whoever waits for tokens runs
the next step, for everybody, one at a time. `submit` and `abort` never wait for a step. `AsyncEngine` adds a thread and asyncio.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import cast

from mlsdc.runtime.admission import Admission, Prompt
from mlsdc.runtime.commit import finish
from mlsdc.runtime.device.base import Device, LevelMemory, Timed, Watched
from mlsdc.runtime.drafting import Drafting
from mlsdc.runtime.errors import CapacityError, DeviceError, RequestError
from mlsdc.runtime.grammar import GrammarCompiler, fill_masks, fit_drafts
from mlsdc.runtime.kv_pool import KvPool
from mlsdc.runtime.kv_window import window_of
from mlsdc.runtime.level_pages import level_pool
from mlsdc.runtime.levels.base import Level
from mlsdc.runtime.manifest import Manifest
from mlsdc.runtime.outcome import Outcome
from mlsdc.runtime.request import Delta, Request, Result, StepItem
from mlsdc.runtime.sampling.record import RecordWriter
from mlsdc.runtime.sampling_params import SamplingParams
from mlsdc.runtime.scheduler import Scheduler
from mlsdc.runtime.slabs import SlabPool
from mlsdc.runtime.statistics import Statistics
from mlsdc.runtime.step import Array, StepBuffers
from mlsdc.runtime.tokenizer import Tokenizer
from mlsdc.runtime.verify import write_rows

OnToken = Callable[[int, Delta], None]


class Engine:
    """Serves one artifact on one device. Close it, or use it in `with`."""

    def __init__(self, manifest: Manifest, device: Device, memory: LevelMemory, levels: Sequence[Level] = (), *,
                 tokenizer: Tokenizer | None = None, slabs: SlabPool | None = None) -> None:
        """Parts made by hand (tests, embedding without files); `load` makes them from an artifact. Raises ArtifactError.

        `slabs` are what the target's pages share with other levels'; without them the whole pool is the target's.
        """
        self.manifest = manifest
        self.device = device
        self.tokenizer = tokenizer
        self.pool = level_pool(slabs, memory, window=window_of(manifest.target_level.params)) if slabs else KvPool.alone(
            memory.num_pages, memory.buffers.page_size, copy_page=memory.copy_page)
        self.scheduler = Scheduler(manifest.limits, self.pool)
        self.drafting = Drafting(manifest, levels)
        masked = memory.buffers.masks.shape[1] > 0
        grammars = GrammarCompiler(tokenizer, manifest.model.vocab_size, manifest.model.eos_token_ids) if masked else None
        self._admission = Admission(manifest, self.scheduler, tokenizer, [level.name for level in levels], grammars)
        self.statistics = Statistics()  # of all finished requests
        self._memory = memory
        self._forward = memory.programs["forward"]
        self._commit = memory.programs["commit"]
        self._sample = memory.programs["sample"]
        self._follow = memory.programs.get("follow")
        self._records = RecordWriter(memory.buffers)
        self._outcome = Outcome(memory.buffers, self.drafting)
        self._inbox: deque[Request] = deque()
        self._aborts: deque[Request] = deque()
        self._news = threading.Condition()
        self._stepping = False
        self._closed = False
        self._broken: BaseException | None = None
        self._step_started: float | None = None  # on the monotonic clock
        self._seen_step: Callable[[float], None] | None = None
        self._wake_readers: Callable[[], None] = lambda: None

    @staticmethod
    def load(path: str | Path, *, threads: int | None = None, num_pages: int | None = None, kv_pool_bytes: int | None = None,
             memory_bytes: int | None = None, device: str = "auto", plan_file: str | Path | None = None,
             kernel_file: str | Path | None = None) -> Engine:
        """Open and check an artifact and make it ready to serve on this machine.

        The page pool's size is `num_pages` of the target's, else `kv_pool_bytes`, else what `memory_bytes` leaves beside weights,
        activations and buffers, else what the artifact says (`memory` of model.yaml), else room for `max_num_seqs` full contexts in at
        most a quarter of the memory. `plan_file`: what `mlsdc tune` wrote; default: beside the artifact, if it is there and of this
        artifact and machine (`engine.drafting.plan_note` says what is used); `kernel_file` likewise, of a GPU's kernels
        (`engine.device.kernel_note`). Raises ArtifactError, DeviceError, CapacityError.
        """
        from mlsdc.runtime.loading import load_engine

        return load_engine(path, threads=threads, num_pages=num_pages, kv_pool_bytes=kv_pool_bytes, memory_bytes=memory_bytes,
                           device=device, plan_file=plan_file, kernel_file=kernel_file)

    def watch_forward(self, seen: Callable[[StepBuffers, Array], None]) -> None:
        """Call `seen(step buffers, logits)` after every run of the target's forward program, in the thread that runs it.

        Logits are f32[max_logit_rows, padded vocabulary], one row for each of `out_rows`, valid until the next run.
        """
        self._forward = Watched(self._forward, lambda: seen(self._memory.buffers, self._forward.tap("logits")))

    def watch_steps(self, seen: Callable[[float, float], None]) -> None:
        """Call `seen(seconds of the step, seconds of it outside the device's programs)` after each, in the thread that ran it."""
        timed = [Timed(program) for program in (self._forward, self._sample, self._commit)]
        self._forward, self._sample, self._commit = timed
        self._seen_step = lambda seconds: seen(seconds, seconds - sum(program.take() for program in timed))

    def wake_readers_by(self, wake: Callable[[], None]) -> None:
        """Call `wake()`, from any thread, some time after listeners were told of news: when the next step's programs start, or none is due.

        What readers do then costs no step its own work: it is done while the device computes.
        """
        self._wake_readers = wake

    @property
    def alive(self) -> bool:
        """Neither closed nor broken by a step."""
        return not self._closed and self._broken is None

    @property
    def step_age_s(self) -> float:
        """How long the step that is running has been running; 0 between steps."""
        started = self._step_started
        return 0.0 if started is None else time.perf_counter() - started

    def fail(self, error: Exception) -> None:
        """End every request with `error` and take no others, from any thread, though a step may hang: for a watchdog."""
        self._fail(error)

    # --- the loop ---

    def step(self) -> bool:
        """Run one step for all requests; False if there was nothing to do. One thread at a time (`generate` and `stream` see to that)."""
        self._take_inbox()
        items = self.scheduler.schedule()
        if not items:
            return False
        self.drafting.draft(items)
        fit_drafts(items, len(self.manifest.levels))
        write_rows(self._memory.buffers, items)
        fill_masks(self._memory.buffers, items)
        self._wake_readers()
        self._forward.start()
        chose = self._forward
        if self._records.write(items):
            chose = self._sample
            chose.start()
        self.drafting.ahead(items, self._follow)
        chose.finish()
        self._commit_items(items)
        self.drafting.done(items)
        with self._news:
            for item in items:
                item.request.publish()
        return True

    def _commit_items(self, items: Sequence[StepItem]) -> None:
        """Follow the target's choices, copy accepted keys from scratch to pages, let others find full pages, end what has ended."""
        if self._outcome.follow(items):
            self._commit.run()
        for item in items:
            request = item.request
            self.pool.seal(request.table, request.tokens, request.num_computed)
            if request.finished:
                self._end(request)
            elif item.budget:
                self.pool.trim(request.table, len(request.tokens))

    def _take_inbox(self) -> None:
        while self._inbox:
            self.scheduler.add(self._inbox.popleft())
        while self._aborts:
            request = self._aborts.popleft()
            if not request.finished:
                finish(request, "abort")
                self._end(request)
                with self._news:
                    request.publish()

    def _end(self, request: Request) -> None:
        self.scheduler.remove(request)
        self.statistics.merge(request.statistics)
        self.drafting.end(request)

    # --- requests in ---

    def submit(self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0,
               listener: deque[Request] | None = None) -> Request:
        """Queue one request and return at once; `wait` for it. Raises RequestError, DeviceError.

        Requests of a lower `priority` number are served first. `listener` is appended the request (or a choice of it, with `n`) whenever
        a step brought it something, in the thread that ran the step.
        """
        request = self._admission.prepare(prompt, params or SamplingParams(), deque() if listener is None else listener, priority)
        self._enqueue([request])
        return request

    def abort(self, request: Request) -> None:
        """End a request and all its choices, at once or after the step that is running; its tokens so far stay.

        Aborting a finished request does nothing.
        """
        self._aborts.extend(request.choices)
        with self._news:
            if not self._stepping and not self._closed and self._broken is None:
                self._take_inbox()
            self._news.notify_all()
        self._wake_readers()

    def _enqueue(self, requests: Sequence[Request]) -> None:
        with self._news:
            self._check_open()
            self._inbox.extend(requests)
            self._news.notify_all()

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Token ids of a text, a chat, or checked token ids. Raises RequestError."""
        return self._admission.tokenize(prompt)

    # --- tokens out ---

    def generate(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None, *,
                 on_token: OnToken | None = None, priority: int = 0) -> list[Result]:
        """Serve prompts (texts, lists of token ids, chats) together; results come in the same order.

        `on_token(i, delta)` is called for prompt i as tokens come; if it raises, all of this call's requests are aborted. Nothing runs if
        any of them is refused. Raises RequestError, DeviceError.
        """
        listed = _as_prompts(prompts)
        each = [params] * len(listed) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(listed):
            raise RequestError(f"sampling params: {len(each)} for {len(listed)} prompts")
        listener: deque[Request] = deque()
        prepare = self._admission.prepare
        requests = [prepare(prompt, p or SamplingParams(), listener, priority) for prompt, p in zip(listed, each, strict=True)]
        number = {choice.id: i for i, request in enumerate(requests) for choice in request.choices}
        self._enqueue(requests)
        left = len(number)
        try:
            while left:
                request = self._next(listener)
                delta = request.take()
                if on_token is not None and (delta.token_ids or delta.text or delta.finish_reason):
                    on_token(number[request.id], delta)
                left -= delta.finish_reason is not None
        except BaseException:
            for request in requests:
                self.abort(request)
            raise
        return [request.result() for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0) -> Iterator[Delta]:
        """Serve one prompt and yield what each step brings; leaving the loop early aborts it. Raises as `submit` does, at once."""
        return self._deltas(self.submit(prompt, params, priority=priority))

    def wait(self, request: Request) -> Result:
        """Run or await steps until a submitted request is finished."""
        for _ in self._deltas(request):
            pass
        return request.result()

    def _deltas(self, request: Request) -> Iterator[Delta]:
        listener = request.listener
        assert listener is not None  # `submit` made it
        left = len(request.choices)
        try:
            while left:
                delta = self._next(listener).take()
                left -= delta.finish_reason is not None
                if delta.token_ids or delta.text or delta.finish_reason:
                    yield delta
        finally:
            self.abort(request)

    def _next(self, listener: deque[Request]) -> Request:
        """The next request of `listener` that has news; runs a step, or waits for the thread that does."""
        while True:
            with self._news:
                while not listener and self._stepping:
                    self._news.wait()
                if listener:
                    request = listener.popleft()
                    if request.error is not None:
                        raise request.error
                    return request
                self._check_open()
                self._stepping = True
            self._run_step()

    def serve(self, stopped: Callable[[], bool]) -> None:
        """Run steps for whoever submits, until `stopped()`; it is asked whenever the engine is woken. Returns when the engine is closed.

        Raises what a step raised; every request has ended with an error then.
        """
        while True:
            with self._news:
                self._news.wait_for(lambda: stopped() or self._closed or self._broken or (self.has_work and not self._stepping))
                if stopped() or self._closed or self._broken:
                    return
                self._stepping = True
            self._run_step()

    def wake(self) -> None:
        """Make `serve` ask whether it is to stop."""
        with self._news:
            self._news.notify_all()

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do."""
        return bool(self._inbox or self._aborts or self.scheduler.running or self.scheduler.waiting)

    def _run_step(self) -> None:
        """One step by the thread that set `_stepping`."""
        self._step_started = started = time.perf_counter()
        try:
            if self.step():
                if self._seen_step is not None:
                    self._seen_step(time.perf_counter() - started)
            elif self.scheduler.running or self.scheduler.waiting:
                raise CapacityError("scheduler: requests wait and none of them can run")
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._step_started = None
            with self._news:
                self._stepping = False
                self._news.notify_all()
            if not self.has_work:
                self._wake_readers()

    def _fail(self, error: BaseException) -> None:
        """A step broke off: nothing on the device can be trusted, so every request ends with an error that says so."""
        with self._news:
            self._broken = error
            for request in self._unfinished():
                request.error = DeviceError(f"the engine stopped: {type(error).__name__}: {error}")
                request.finish_reason = "error"
                request.publish()
        self._wake_readers()

    def _unfinished(self) -> list[Request]:
        return [*self.scheduler.requests(), *(choice for request in self._inbox for choice in request.choices)]

    def _check_open(self) -> None:
        if self._closed:
            raise DeviceError("the engine is closed")
        if self._broken is not None:
            raise DeviceError(f"the engine stopped: {type(self._broken).__name__}: {self._broken}; load it again")

    def check_integrity(self) -> None:
        """Every page is free, cached or owned, exactly once. Raises CapacityError."""
        self.pool.check_integrity([request.table for request in self.scheduler.requests()])

    def close(self) -> None:
        """End all requests and free the device; waits for a step that is running. Safe to call twice."""
        with self._news:
            if self._closed:
                return
            self._closed = True
            while self._stepping:
                self._news.wait()
            for request in self._unfinished():
                request.error = DeviceError("the engine was closed")
                request.finish_reason = "abort"
                request.publish()
            self._news.notify_all()
        self._wake_readers()
        self.device.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many: a text, a list of ids and a list of messages are one."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise RequestError(f"prompts: {type(prompts).__name__}, expected a prompt or a list of prompts")
    if not prompts:
        return []
    first = prompts[0]
    if isinstance(first, (str, Sequence)):
        return list(cast("Sequence[Prompt]", prompts))
    return [cast("Prompt", prompts)]
