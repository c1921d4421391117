"""What is in the repository is in the wheel and the sdist, and what is in the wheel starts."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PORTIONS = ("compiler", "passes", "runtime", "targets", "templates")
SHIPPED = (".py", ".jinja", ".ll", ".tsv", ".typed", ".html", ".css", ".js")


def shipped_files() -> set[str]:
    """`mlsdc/...` path of every file that must be installed."""
    return {
        f"mlsdc/{path.relative_to(ROOT).as_posix()}"
        for portion in PORTIONS
        for path in (ROOT / portion).rglob("*")
        if path.suffix in SHIPPED and "__pycache__" not in path.parts
    }


def test_every_folder_with_files_is_a_listed_package() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {str(Path(name).parent).replace("/", ".") for name in shipped_files()}
    assert sorted(listed) == sorted(folders)


def test_every_shipped_suffix_is_known() -> None:
    found = {
        path.suffix for portion in PORTIONS for path in (ROOT / portion).rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    assert found <= set(SHIPPED)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist, built from a copy so that the tree stays clean."""
    copy = tmp_path_factory.mktemp("source")
    tracked = [f"{portion}" for portion in PORTIONS] + ["pyproject.toml", "README.md", "LICENSE"]
    subprocess.run(["cp", "-r", *tracked, str(copy)], cwd=ROOT, check=True)
    out = tmp_path_factory.mktemp("built")
    code = f"from setuptools import build_meta as b; b.build_sdist({str(out)!r}); b.build_wheel({str(out)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=copy, check=True, capture_output=True)
    return out


def test_wheel_holds_every_file(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("mlsdc/")}
    assert names == shipped_files()


def test_sdist_holds_every_file(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {name.removeprefix("mlsdc/") for name in shipped_files()} <= names


def test_wheel_starts_without_any_dependency(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    target = subprocess.run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
                            capture_output=True, text=True, check=True).stdout.strip()
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--disable-pip-version-check", "--target", target]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True)
    console_script = "import sys; from mlsdc.compiler.cli import main; sys.argv[0] = 'mlsdc'; sys.exit(main(['--version']))"
    done = subprocess.run([str(python), "-c", console_script], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "mlsdc 0.1.0\n", "")


def test_console_script_is_the_cli(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    (entry,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
    assert "mlsdc = mlsdc.compiler.cli:main" in archive.read(entry).decode()
