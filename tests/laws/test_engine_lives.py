"""Engines come and go in one process: threads end, neighbours do not meet, a kernel that refuses its arguments is an error."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from mlsdc.runtime.device.cpu import FLOAT, CpuProgram
from mlsdc.runtime.engine import Engine
from mlsdc.runtime.errors import DeviceError
from mlsdc.runtime.sampling_params import SamplingParams

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6] * 12]


def test_fifty_engines_in_a_row_leave_no_thread_behind(tiny: Path) -> None:
    before, texts = threading.active_count(), set()
    for i in range(50):
        with Engine.load(tiny, threads=1 + i % 4, num_pages=40) as engine:
            assert threading.active_count() == before + i % 4
            texts.add(tuple(engine.generate([PROMPTS[0]], PARAMS)[0].token_ids))
        assert threading.active_count() == before
    assert len(texts) == 1


def test_an_engine_that_never_ran_closes_twice(tiny: Path) -> None:
    before = threading.active_count()
    engine = Engine.load(tiny, threads=3, num_pages=40)
    engine.close()
    engine.close()
    assert threading.active_count() == before


def test_a_load_that_fails_leaves_no_thread_behind(tiny: Path) -> None:
    from mlsdc.runtime.errors import MlsdcError

    before = threading.active_count()
    for _ in range(3):
        with pytest.raises(MlsdcError):
            Engine.load(tiny, threads=3, num_pages=1)
    assert threading.active_count() == before


@pytest.mark.parametrize("threads", [(1, 1), (2, 3)])
def test_two_engines_serve_at_once(tiny: Path, threads: tuple[int, int]) -> None:
    with Engine.load(tiny, threads=1, num_pages=60) as engine:
        wanted = [r.token_ids for r in engine.generate(PROMPTS, PARAMS)]
    results: list[list[list[int]]] = [[], []]
    with Engine.load(tiny, threads=threads[0], num_pages=60) as one, Engine.load(tiny, threads=threads[1], num_pages=60) as two:

        def serve(engine: Engine, into: list[list[int]]) -> None:
            for _ in range(10):
                into += [r.token_ids for r in engine.generate(PROMPTS, PARAMS)]

        workers = [threading.Thread(target=serve, args=(engine, into)) for engine, into in zip((one, two), results, strict=True)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert results == [wanted * 10] * 2


def test_threads_share_one_engine(tiny: Path) -> None:
    with Engine.load(tiny, threads=2, num_pages=120) as engine:
        wanted = [r.token_ids for r in engine.generate(PROMPTS, PARAMS)]
        results: list[list[list[int]]] = [[] for _ in range(6)]

        def serve(into: list[list[int]]) -> None:
            into += [r.token_ids for r in engine.generate(PROMPTS, PARAMS)]

        workers = [threading.Thread(target=serve, args=(into,)) for into in results]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert results == [wanted] * 6
        engine.check_integrity()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("launch", [0, 4, -1])
def test_a_kernel_that_refuses_its_arguments_is_an_error_that_names_it(tiny: Path, threads: int, launch: int) -> None:
    with Engine.load(tiny, threads=threads, num_pages=40) as engine:
        program = engine._memory.programs["forward"]
        assert isinstance(program, CpuProgram)
        program._args[launch][-1, 0] = FLOAT  # a number where an address should be
        with pytest.raises(DeviceError) as caught:
            engine.generate([PROMPTS[1]], PARAMS)
        assert f"kernel '{program.spec.launches[launch].kernel}' of %{program.spec.launches[launch].node} refused" in str(caught.value)
        assert "\n" not in str(caught.value)
        with pytest.raises(DeviceError, match="the engine stopped"):
            engine.generate([PROMPTS[0]], PARAMS)
    with Engine.load(tiny, threads=threads, num_pages=40) as engine:
        assert len(engine.generate([PROMPTS[0]], PARAMS)[0].token_ids) == 12


@pytest.mark.parametrize("threads", [0, -1, 257])
def test_a_number_of_threads_that_cannot_be_is_an_error(tiny: Path, threads: int) -> None:
    with pytest.raises(DeviceError, match=f"threads: {threads}, expected 1..256"):
        Engine.load(tiny, threads=threads)
