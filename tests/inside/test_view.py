"""`mlsdc view`: one page, offline, in a real browser."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mlsdc.compiler import cli
from mlsdc.compiler.graph import Builder
from mlsdc.compiler.ops_core import Binary, Unary
from mlsdc.compiler.text import print_graph
from mlsdc.compiler.types import DType, TensorType
from tests.inside.browser import in_browser
from tests.inside.model import Tiny


@pytest.fixture(scope="module")
def page(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("view") / "page.html"
    assert cli.main(["view", str(tiny.dump), str(tiny.artifact), "-o", str(output)]) == 0
    return output


def test_the_page_asks_the_network_for_nothing(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[\w./]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<link|<img|@import|\bsrc=|fetch\(|XMLHttpRequest", text)


def test_the_same_compile_gives_the_same_page(page: Path, tiny: Tiny, tmp_path: Path) -> None:
    assert cli.main(["view", str(tiny.dump), str(tiny.artifact), "-o", str(tmp_path / "again.html")]) == 0
    assert (tmp_path / "again.html").read_bytes() == page.read_bytes()


def test_every_pass_is_a_place_of_the_slider_and_the_last_one_is_shown(page: Path, tiny: Tiny) -> None:
    script = "return [document.querySelectorAll('.tick').length, +$('slider').value, document.querySelector('#pass-name b').textContent]"
    found = in_browser(page, script)
    files = sorted(tiny.dump.glob("*.ir"))
    assert found == [len(files), len(files) - 1, files[-1].stem[3:]]


def test_a_click_on_a_node_shows_its_type_its_origin_and_the_source_of_its_kernel(page: Path) -> None:
    text = in_browser(page, "click('[data-node=\"layers.0.attn.attend\"]'); return $('details').textContent")
    assert "a8[rows, 128]" in text
    assert "model.layers.0.self_attn" in text
    assert "def kernel(" in text


def test_keys_move_through_passes_search_and_fold(page: Path) -> None:
    found = in_browser(page, """
        key("ArrowLeft"); const before = state.pass;
        find("mlp.gated"); const results = names("#results [data-node]");
        key("Enter", $("search")); const chosen = state.node;
        key("ArrowUp"); const above = state.node;
        key("e"); const open = state.open.size; key("t"); const theme = document.documentElement.dataset.theme;
        key("3"); const kv = $("kv").textContent.includes("16");
        return {before, results, chosen, above, open, theme, tab: state.tab, kv}""", "theme=light")
    assert found["results"] == ["layers.0.mlp.gated", "layers.1.mlp.gated"]
    assert found["chosen"] == "layers.0.mlp.gated"
    assert found["above"] == "layers.0.mlp_norm"
    assert (found["open"], found["theme"], found["tab"], found["kv"]) == (4, "dark", "kv", True)


def test_a_fused_node_says_what_it_was(page: Path, tiny: Tiny) -> None:
    number = next(i for i, path in enumerate(sorted(tiny.dump.glob("*.ir"))) if path.stem.endswith("fuse-gate-up"))
    found = in_browser(page, "return [model.status.get('layers.0.mlp.gated'), model.heirs.get('layers.0.mlp.gated')]", f"pass={number}")
    assert found[0] == "fused"
    assert {"layers.0.mlp.gate", "layers.0.mlp.up", "layers.0.mlp.act"} <= set(found[1])


def test_of_two_thousand_open_nodes_only_what_is_seen_is_drawn(tmp_path: Path) -> None:
    builder = Builder("forward")
    x = builder.input("x", TensorType(DType.F32, (4, 64)))
    for layer in range(40):
        for i in range(25):
            y = builder.add(f"layers.{layer}.a{i}", Unary("silu"), x)
            x = builder.add(f"layers.{layer}.b{i}", Binary("add"), x, y)
    (tmp_path / "big.ir").write_text(print_graph(builder.build(y=x)))
    assert cli.main(["view", str(tmp_path / "big.ir"), "-o", str(tmp_path / "big.html")]) == 0
    found = in_browser(tmp_path / "big.html", """
        foldAll(); draw();
        const drawn = document.querySelectorAll(".card").length; Object.assign(view, {k: .002, y: 9}); draw();
        return {drawn, open: state.open.size, every: document.querySelectorAll(".card").length}""")
    assert found["open"] == 41
    assert found["every"] == 2001
    assert 0 < found["drawn"] < 100


def test_a_path_that_is_nothing_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["view", str(tmp_path)]) == 2
    assert "neither an artifact nor a folder of `--dump-ir`" in capsys.readouterr().err
    (tmp_path / "a.json").write_text(json.dumps([1]))
    assert cli.main(["view", str(tmp_path / "a.json")]) == 2
    assert "not a trace" in capsys.readouterr().err


@pytest.mark.model
def test_smollm2_is_less_than_three_megabytes(smollm2: Path, tmp_path: Path) -> None:
    assert cli.main(["view", str(smollm2), "-o", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").stat().st_size < 3e6
