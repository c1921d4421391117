"""The command line: instant help, one line for a mistake, exit codes, silence in a pipe."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlsdc.compiler import cli
from mlsdc.compiler.progress import Silent, Terminal, progress
from mlsdc.runtime.errors import MlsdcError


def run(*argv: str, cwd: Path | str = "/") -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "mlsdc.compiler.cli", *argv], capture_output=True, text=True, cwd=cwd)


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    """The error's text of a run that refused."""
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("mlsdc: error: ")
    return line.removeprefix("mlsdc: error: ")


def test_help_lists_every_verb() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert all(f"  {verb}" in done.stdout for verb in cli.VERBS)


def test_help_imports_nothing_heavy() -> None:
    code = "import sys; from mlsdc.compiler.cli import main; main(['--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", check=True)
    assert not {"numpy", "torch", "tvm", "yaml", "networkx"} & set(done.stdout.split())


@pytest.mark.parametrize("verb", list(cli.VERBS))
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([verb, "--help"])
    assert caught.value.code == 0
    assert f"usage: mlsdc {verb}" in capsys.readouterr().out


def test_unknown_verb_is_one_line_with_a_suggestion() -> None:
    assert one_line(run("insepct")).startswith("'insepct' is not a verb (did you mean 'inspect'?); verbs are compile, ")


def test_bad_option_is_one_line() -> None:
    assert one_line(run("run", "--frobnicate")) == "the following arguments are required: artifact, --prompt (see `mlsdc run --help`)"


def test_missing_artifact_is_one_line() -> None:
    assert one_line(run("inspect", "nowhere.mlsdc")).startswith("nowhere.mlsdc: no such artifact folder")


def test_missing_config_is_one_line(tmp_path: Path) -> None:
    assert one_line(run("compile", "no.yaml", cwd=tmp_path)) == "no.yaml: cannot be read (No such file or directory)"
    assert list(tmp_path.iterdir()) == []


def test_verb_without_its_extra_says_which(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing(argv: list[str]) -> int:
        raise ModuleNotFoundError("No module named 'tvm'", name="tvm.runtime")

    monkeypatch.setattr(cli, "dispatch", missing)
    assert cli.main(["compile"]) == 2
    assert capsys.readouterr().err == "mlsdc: error: `mlsdc compile` needs tvm: pip install 'mlsdc[compile]'\n"


def test_missing_module_that_is_no_extra_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(argv: list[str]) -> int:
        raise ModuleNotFoundError("No module named 'mlsdc.gone'", name="mlsdc.gone")

    monkeypatch.setattr(cli, "dispatch", missing)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["compile"])


@pytest.mark.parametrize(("raised", "code", "text"), [
    (MlsdcError("a: b"), 2, "mlsdc: error: a: b\n"),
    (KeyboardInterrupt(), 130, "mlsdc: interrupted\n"),
])
def test_exit_code_and_line(raised: BaseException, code: int, text: str, monkeypatch: pytest.MonkeyPatch,
                            capsys: pytest.CaptureFixture[str]) -> None:
    def fail(argv: list[str]) -> int:
        raise raised

    monkeypatch.setattr(cli, "dispatch", fail)
    assert cli.main(["compile"]) == code
    assert capsys.readouterr().err == text


def test_env_names_the_machine_and_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env"]) == 0
    out = capsys.readouterr().out
    assert "cpu  " in out
    assert "numpy" in out


def test_passes_are_listed_in_order_and_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["passes"]) == 0
    listed = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert listed.index("insert-paged-kv") < listed.index("fuse-attention")
    assert cli.main(["passes", "fuse-attention"]) == 0
    assert "before" in capsys.readouterr().out.lower()


def test_targets_are_those_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    from mlsdc.targets import TARGETS
    from mlsdc.targets.cpu_isa import ISAS
    from mlsdc.targets.hardware import AMD_GPUS, GPUS

    assert set(TARGETS) == {"cpu-native", *ISAS, *GPUS, *AMD_GPUS}
    assert cli.main(["targets"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(TARGETS)


def test_opt_prints_what_it_parsed_and_view_writes_it_as_onnx(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from mlsdc.compiler.graph import Builder
    from mlsdc.compiler.ops_core import Unary
    from mlsdc.compiler.text import print_graph
    from mlsdc.compiler.types import DType, TensorType

    builder = Builder("g")
    x = builder.input("x", TensorType(DType.F32, (4, 8)))
    text = print_graph(builder.build(y=builder.add("y", Unary("silu"), x)))
    (tmp_path / "g.ir").write_text(text)
    for passes in (["eliminate-dead"], ["--passes", "eliminate-common, eliminate-dead"]):
        assert cli.main(["opt", str(tmp_path / "g.ir"), *passes]) == 0
        assert capsys.readouterr().out == text
    onnx = pytest.importorskip("onnx")
    assert cli.main(["view", str(tmp_path / "g.ir"), "--onnx", str(tmp_path / "g.onnx")]) == 0
    onnx.checker.check_model(str(tmp_path / "g.onnx"))


def test_opt_shows_where_a_text_does_not_parse(tmp_path: Path) -> None:
    (tmp_path / "g.ir").write_text("graph g\n\n%x = nonsense(\n")
    done = run("opt", "g.ir", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("mlsdc: error: g.ir:3:")


def test_reader_that_goes_away_is_no_error() -> None:
    shell = f"{sys.executable} -m mlsdc.compiler.cli passes; echo $? >&2"
    done = subprocess.run(["bash", "-c", f"({shell}) | head -c 1 > /dev/null"], capture_output=True, text=True, cwd="/")
    assert done.stderr.strip() == "0"


def test_progress_is_silent_in_a_pipe() -> None:
    out = io.StringIO()
    with progress(out) as shown:
        shown.stage("weights")
        shown.step(1, 2, "a")
    assert out.getvalue() == ""
    assert isinstance(shown, Silent)


def test_progress_on_a_terminal_rewrites_one_line_a_stage() -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Screen()
    with progress(out) as shown:
        for stage in ("passes", "weights"):
            shown.stage(stage)
            shown.step(1, 2, "a")
    assert isinstance(shown, Terminal)
    assert out.getvalue().count("\n") == 2
    assert "weights  1/2  a" in out.getvalue()


def test_interrupted_compile_leaves_nothing(tmp_path: Path) -> None:
    """SIGTERM while packing: a stand-in for the compile writes half an artifact and waits for the signal."""
    code = (
        "import os, signal, sys\n"
        "from mlsdc.compiler import cli\n"
        "from mlsdc.compiler.pack import staged\n"
        "def half(argv):\n"
        "    with staged('a.mlsdc') as folder:\n"
        "        (folder / 'half').write_text('')\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        signal.pause()\n"
        "cli.dispatch = half\n"
        "sys.exit(cli.main(['compile']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env={**os.environ})
    assert (done.returncode, done.stderr) == (130, "mlsdc: interrupted\n")
    assert list(tmp_path.iterdir()) == []
