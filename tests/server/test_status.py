"""The metrics and the status page say what happened."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from rig import HI, TOKENIZER, serving

from mlsdc.runtime.server.overview import quantile


def test_metrics_count_what_was_served() -> None:
    async def main() -> None:
        async with serving() as rig:
            prompt = "abc" * 9
            answers = [
                (await rig.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 50, "temperature": 0, "stream": stream}))
                for stream in (False, True)
            ]
            assert {answer.status_code for answer in answers} == {200}
            figures = answers[0].json()["usage"]["speculation"]
            assert await rig.metric("generation_tokens_total") == 100
            assert await rig.metric("prompt_tokens_total") == 2 * len(TOKENIZER.encode(prompt))
            assert await rig.metric("spec_decode_num_draft_tokens_total") == 2 * figures["drafted"] > 0
            assert await rig.metric("spec_decode_num_accepted_tokens_total") == 2 * figures["accepted"]
            assert await rig.metric("spec_decode_num_accepted_tokens_per_pos_total") == 2 * figures["accepted"]
            assert await rig.metric("spec_decode_num_steps_total") == 2 * figures["steps"]
            assert await rig.metric("time_to_first_token_seconds_count") == 2
            assert await rig.metric("inter_token_latency_seconds_count") == 98
            assert await rig.metric("e2e_request_latency_seconds_count") == 2
            assert await rig.metric("request_success_total") == 2
            assert await rig.metric("step_seconds_count") >= figures["steps"]
            assert await rig.metric("prefix_cache_hits_total") > 0
            assert await rig.metric("num_requests_running") == await rig.metric("num_requests_waiting") == 0
            assert await rig.metric("kv_cache_usage_perc") == 0
            page = (await rig.http.get("/metrics")).text
            assert 'spec_decode_num_accepted_tokens_per_pos_total{level="ngram",model_name="fake",position="0"}' in page
            assert 'request_success_total{finished_reason="length",model_name="fake"} 2.0' in page

    asyncio.run(main())


def test_a_burst_is_as_many_samples_as_tokens() -> None:
    """F5: a step's tokens share its time."""
    async def main() -> None:
        async with serving() as rig:
            await rig.http.post("/v1/completions", json={"prompt": "abc" * 9, "max_tokens": 80, "temperature": 0})
            assert await rig.metric("inter_token_latency_seconds_count") == 79
            assert await rig.metric("inter_token_latency_seconds_sum") <= await rig.metric("e2e_request_latency_seconds_sum")

    asyncio.run(main())


def test_examples_use_metrics_that_exist(root: Path) -> None:
    async def main() -> str:
        async with serving() as rig:
            await rig.http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 30, "temperature": 0})
            await rig.http.post("/v1/completions", json={"prompt": "abc" * 9, "max_tokens": 30})
            return (await rig.http.get("/metrics")).text

    names = set(re.findall(r"^# TYPE (mlsdc:\w+)", asyncio.run(main()), re.M))
    dashboard = json.loads((root / "examples" / "grafana-dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    text = "\n".join([*queries, (root / "examples" / "prometheus-alerts.yaml").read_text()])
    used = set(re.findall(r"mlsdc:\w+", text))
    assert len(used) > 15
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in used} <= names


def test_the_status_page_is_whole_and_its_figures_are_the_engines() -> None:
    async def main() -> None:
        async with serving() as rig:
            page = await rig.http.get("/")
            assert page.headers["content-type"].startswith("text/html")
            assert not re.search(r"(src|href)=", page.text), "nothing is loaded from anywhere"
            before = (await rig.http.get("/status.json")).json()
            assert (before["state"], before["running"], before["tokens_total"]) == ("ready", 0, 0)
            await rig.http.post("/v1/completions", json={"prompt": "abc" * 9, "max_tokens": 60, "temperature": 0})
            after = (await rig.http.get("/status.json")).json()
            assert after["tokens_total"] == 60
            assert after["levels"]["ngram"]["drafted"] > 0
            assert after["itl_ms"]["p99"] >= after["itl_ms"]["p50"] > 0
            assert after["kv"][0]["used"] == 0

    asyncio.run(main())


def test_quantiles() -> None:
    values = [float(i) for i in range(1, 101)]
    assert [quantile(values, share) for share in (0.5, 0.99, 1.0, 0.0)] == [50.0, 99.0, 100.0, 1.0]
    assert quantile([], 0.5) is None
    assert quantile([3.0], 0.99) == 3.0


@pytest.mark.skipif(shutil.which("chromium") is None, reason="Debian's chromium is not installed")
def test_a_browser_shows_the_figures(tmp_path: Path) -> None:
    uvicorn = pytest.importorskip("uvicorn")
    ports: list[int] = []

    async def main() -> None:
        async with serving() as rig:
            config = uvicorn.Config(rig.app, port=0, lifespan="off", log_level="error")
            server = uvicorn.Server(config)
            task = asyncio.ensure_future(server.serve())
            while not server.started:
                await asyncio.sleep(0.01)
            ports.append(server.servers[0].sockets[0].getsockname()[1])
            await rig.http.post("/v1/completions", json={"prompt": "abc" * 9, "max_tokens": 60, "temperature": 0})
            found = await asyncio.to_thread(browse, ports[0], tmp_path)
            server.should_exit = True
            await task
            assert '<h1 id="model">fake</h1>' in found
            assert '<span id="state" class="">ready</span>' in found
            assert "ngram: " in found

    def browse(port: int, folder: Path) -> str:
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}", "--virtual-time-budget=4000",
                   "--dump-dom", f"http://127.0.0.1:{port}/"]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout

    asyncio.run(main())
