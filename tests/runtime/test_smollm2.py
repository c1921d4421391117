"""The laws on the real model: SmolLM2's artifact on this machine's CPU."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlsdc.runtime import Artifact, AsyncEngine, DeviceError, Engine, SamplingParams, Speculation
from mlsdc.runtime.device import open_device
from tests.function_level import steady

pytestmark = pytest.mark.model

CHATS = [
    [{"role": "user", "content": text}] for text in (
        "What is the capital of France?", "Repeat this list twice: apple, banana, cherry, date.", "Name three colours, as emoji.")
]
OFF = Speculation(enabled=False)


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Iterator[Engine]:
    with Engine.load(smollm2, threads=1) as engine:
        yield steady(engine)


@pytest.fixture(scope="module")
def plain(engine: Engine) -> list[list[int]]:
    """Each chat alone, without speculation."""
    return [engine.generate([chat], SamplingParams(max_tokens=40, speculation=OFF))[0].token_ids for chat in CHATS]


@pytest.mark.parametrize("drafts", [1, 2, 4, 7])
def test_drafts_in_a_batch_give_the_same_ids(engine: Engine, plain: list[list[int]], drafts: int) -> None:
    results = engine.generate(CHATS, SamplingParams(max_tokens=40, speculation=Speculation(max_draft_tokens=drafts)))
    assert [r.token_ids for r in results] == plain
    assert sum(r.statistics.accepted for r in results) > 0
    engine.check_integrity()


def test_two_threads_and_a_small_pool_give_the_same_ids(smollm2: Path, plain: list[list[int]]) -> None:
    with Engine.load(smollm2, threads=2, num_pages=7) as engine:
        results = engine.generate(CHATS, SamplingParams(max_tokens=40))
        assert [r.token_ids for r in results] == plain
        engine.check_integrity()


def test_choices_of_one_prompt_share_its_pages_and_say_the_same(engine: Engine, plain: list[list[int]]) -> None:
    requests = [engine.submit(chat, SamplingParams(max_tokens=40, n=2)) for chat in CHATS]
    for request, ids in zip(requests, plain, strict=True):
        result = engine.wait(request)
        assert [result.token_ids, *(other.token_ids for other in result.others)] == [ids] * 2
        assert result.others[0].statistics.cached_tokens == len(result.prompt_token_ids) - 1
    engine.check_integrity()


def test_coroutines_get_the_same_ids(smollm2: Path, plain: list[list[int]]) -> None:
    async def main() -> list[list[int]]:
        async with AsyncEngine.load(smollm2, threads=1) as engine:
            return [result.token_ids for result in await engine.generate_all(CHATS, SamplingParams(max_tokens=40))]

    assert asyncio.run(main()) == plain


def test_levels_of_a_device_share_one_pool_of_bytes(smollm2: Path) -> None:
    artifact = Artifact.open(smollm2)
    device = open_device(artifact, artifact.pick_target("auto"), threads=1)
    name = artifact.manifest.target_level.name
    one, two = device.load_level(name, 8), device.load_level(name, 4)
    one.write_page(3, np.full(one.read_page(3).shape, 7, np.uint8))
    assert (two.read_page(3) == 7).all()
    with pytest.raises(DeviceError, match="kv pool"):
        device.load_level(name, 9)
    device.close()


def test_a_stream_brings_the_text_of_its_ids(engine: Engine) -> None:
    deltas = list(engine.stream(CHATS[2], SamplingParams(max_tokens=30)))
    assert engine.tokenizer is not None
    assert "".join(d.text for d in deltas) == engine.tokenizer.decode([t for d in deltas for t in d.token_ids])


@settings(max_examples=30)
@given(st.lists(st.integers(0, 49151), max_size=30), st.lists(st.integers(1, 5), max_size=30))
def test_any_ids_of_its_vocabulary_stream_to_their_full_decode(engine: Engine, tokens: list[int], sizes: list[int]) -> None:
    assert engine.tokenizer is not None
    stream = engine.tokenizer.stream()
    rest, text = list(tokens), ""
    for size in [*sizes, *[1] * len(tokens)]:
        text += stream.feed(rest[:size])
        del rest[:size]
    assert text + stream.flush() == engine.tokenizer.tokenizer.decode(tokens)


def test_it_serves_with_an_empty_path_no_home_and_starts_no_process(smollm2: Path) -> None:
    code = f"""
import sys
def audit(event, args):
    if event in ("os.exec", "os.posix_spawn", "subprocess.Popen", "os.system", "os.fork", "os.forkpty", "socket.connect"):
        raise RuntimeError(event)
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        raise RuntimeError(f"writes {{args[0]}}")
sys.addaudithook(audit)
sys.dont_write_bytecode = True
from mlsdc.runtime import Engine, SamplingParams
with Engine.load({str(smollm2)!r}, threads=1) as engine:
    print(len(engine.generate([{CHATS[0]!r}], SamplingParams(max_tokens=5))[0].token_ids))
print(*[n for n in ("torch", "triton", "tvm", "transformers", "onnx", "networkx", "gguf", "mlsdc.compiler") if n in sys.modules])
"""
    environment = {"PATH": "", **({"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {})}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd="/")
    assert (done.returncode, done.stdout.split()) == (0, ["5"]), done.stderr
