"""Imports go one way: runtime <- compiler <- templates <- targets <- passes <- compiler.driver <- compiler.cli."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PORTIONS = ("compiler", "passes", "runtime", "targets", "templates")
LAYERS = ("runtime", "compiler", "templates", "targets", "passes", "driver", "cli")

# Imports against the direction that are wanted, each inside a function: (importer, imported) -> why.
ALLOWED = {
    ("mlsdc.compiler", "mlsdc.compiler.driver"): "compile_model is offered by the package and imported when it is first used",
}

HEAVY = ("torch", "triton", "tvm", "transformers", "onnx", "networkx")


def layer(module: str) -> int:
    portion, _, name = module.removeprefix("mlsdc.").partition(".")
    if portion == "compiler" and name == "driver":
        return LAYERS.index("driver")
    if portion == "compiler" and (name == "cli" or name.startswith("cli_")):
        return LAYERS.index("cli")
    return LAYERS.index(portion)


def sources() -> Iterator[tuple[str, Path]]:
    for portion in PORTIONS:
        for path in sorted((ROOT / portion).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            yield "mlsdc." + name.removesuffix(".__init__"), path


def imports(module: str, path: Path) -> Iterator[tuple[str, bool]]:
    """(imported mlsdc module, whether only for type checking)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(node) for block in ast.walk(tree) if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test)
        for statement in block.body for node in ast.walk(statement)
    }
    known = {name for name, _ in sources()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else node.module for name in whole]
        else:
            continue
        yield from ((name, id(node) in typing_only) for name in names if name.startswith("mlsdc."))


def test_imports_go_one_way() -> None:
    wrong = {
        f"{module} imports {imported}"
        for module, path in sources()
        for imported, typing_only in imports(module, path)
        if layer(imported) > layer(module) and not typing_only and (module, imported) not in ALLOWED
    }
    assert not wrong


def test_no_relative_imports() -> None:
    wrong = [
        f"{module}:{node.lineno}"
        for module, path in sources()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not wrong


def loaded_after(statement: str) -> set[str]:
    """Top-level names of all modules that a fresh interpreter has loaded after the statement."""
    code = f"{statement}\nimport sys\nprint(*sorted({{name.partition('.')[0] for name in sys.modules if sys.modules[name]}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    return set(done.stdout.split())


@pytest.mark.parametrize("module", [name for name, _ in sources() if name.startswith("mlsdc.runtime")])
def test_runtime_names_nothing_that_compiles(module: str) -> None:
    path = dict(sources())[module]
    roots = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            roots |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            roots.add(node.module.partition(".")[0])
    assert not roots & set(HEAVY)


def test_importing_the_runtime_loads_nothing_that_compiles() -> None:
    names = [name for name, _ in sources() if name.startswith("mlsdc.runtime") and not name.endswith("__main__")]
    loaded = loaded_after("import " + ", ".join(names))
    assert not loaded & {*HEAVY, "yaml"}


def test_importing_the_compiler_package_loads_nothing_heavy() -> None:
    assert not loaded_after("import mlsdc.compiler, mlsdc.targets") & {*HEAVY, "numpy.f2py", "yaml"}
