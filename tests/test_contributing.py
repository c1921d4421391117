"""The Python in CONTRIBUTING.md runs, and so do the examples."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def sections() -> dict[str, str]:
    """Title -> its Python blocks, joined, for every `## ` section that has any."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)[1:]
    blocks = {title: "\n".join(re.findall(r"^```python\n(.*?)^```$", body, re.MULTILINE | re.DOTALL)) for title, body in zip(
        parts[::2], parts[1::2], strict=True)}
    return {title: code for title, code in blocks.items() if code}


def test_the_three_sections_are_there() -> None:
    assert set(sections()) == {"Add a pass", "Add an op", "Add a target"}


@pytest.mark.parametrize("title", sorted(sections()))
def test_section_runs(title: str, tmp_path: Path) -> None:
    script = tmp_path / "section.py"
    script.write_text(sections()[title])
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_example_pass_is_the_one_in_the_text() -> None:
    example = (ROOT / "examples" / "add_a_pass.py").read_text(encoding="utf-8")
    whole = example[example.index("@dataclass") : example.index("def main")].strip()
    assert whole in sections()["Add a pass"]


def test_example_pass_runs(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(ROOT / "examples" / "add_a_pass.py")], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('fn="neg"') == 2
