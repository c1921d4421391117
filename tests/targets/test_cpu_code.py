"""What LLVM makes of every kernel of SmolLM2's artifact: no product is fused behind our back (law L2), nothing spills or calls."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

from mlsdc.targets.cpu_build import load_function, pipeline
from mlsdc.targets.cpu_isa import ISAS
from mlsdc.targets.protocol import KernelSpec
from tests.once import once
from tests.passes.lowered import Params

pytestmark = pytest.mark.model

ISA = ISAS["cpu-x86-64-v4"]
CONSTANT = re.compile(r"0x[0-9A-F]{16}|-?\d+\.\d+e[+-]\d+")
VALUE = re.compile(r"%[\w.]+")
ZERO = re.compile(r"fsub [^%]*(zeroinitializer|0\.0+e\+00), (%[\w.]+)")


@dataclass(frozen=True)
class Function:
    """One compiled kernel: its optimised LLVM IR and its machine code, as text."""

    name: str
    ir: str
    code: str

    @cached_property
    def values(self) -> dict[str, str]:
        """Instruction by the value it makes."""
        found = (re.match(r"\s+(%[\w.]+) = (.*)", line.split(", !")[0]) for line in self.ir.splitlines())
        return {match[1]: match[2] for match in found if match}

    def bare_products(self) -> Iterator[str]:
        """Sums of a product: LLVM may fuse them, and need not do so in every kernel or tile.

        Those of the same value either way are left out: `0 - a * b`, and products with a power of two, which are exact.
        """
        for name, text in self.values.items():
            if not re.match(r"f(add|sub)\b", text) or self.is_negation(text):
                continue
            for operand in VALUE.findall(text):
                product = self.values.get(operand, "")
                if product.startswith("fmul") and not is_exact(product):
                    yield f"{self.name}: {name} = {text}, {operand} = {product}"

    @property
    def num_fusible(self) -> int:
        """Sums that fusing does not change."""
        sums = [text for text in self.values.values() if re.match(r"f(add|sub)\b", text)]
        return sum(any(self.values.get(o, "").startswith("fmul") for o in VALUE.findall(text)) for text in sums)

    def is_negation(self, text: str) -> bool:
        match = ZERO.match(text)
        return bool(match) and self.values.get(match[2], "").startswith("fmul")  # type: ignore[index]


def is_exact(product: str) -> bool:
    """A factor is a constant power of two: LLVM prints doubles, and floats as doubles, as decimals or as their bits."""
    for text in CONSTANT.findall(product):
        number = struct.unpack(">d", bytes.fromhex(text[2:]))[0] if text.startswith("0x") else float(text)
        if number and abs(math.frexp(number)[0]) == 0.5:
            return True
    return False


@pytest.fixture(scope="module")
def functions(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Function]:
    """Compiled again from the sources in the artifact."""
    sources = sorted(smollm2.glob(f"kernels/{ISA.name}/*.py"))
    if not sources:
        pytest.skip(f"the artifact was not built for {ISA.name}")

    def make(folder: Path) -> None:
        import tvm

        kernels = {path.stem: load_function(path, KernelSpec("", Params(path.stem), ())) for path in sources}
        library = tvm.tirx.build(tvm.IRModule(kernels), target=tvm.target.Target(ISA.llvm_target()), pipeline=pipeline())
        (folder / "kernels.ll").write_text(library.inspect_source("ll"))
        (folder / "kernels.s").write_text(library.inspect_source("asm"))

    folder = once(tmp_path_factory, "cpu-code", make)
    ir, code = (folder / "kernels.ll").read_text(), (folder / "kernels.s").read_text()
    found = []
    for match in re.finditer(r"^define [^\n]*?@(\w+)\(.*?^}", ir, re.S | re.M):
        name = match[1]
        body = re.search(rf"^{name}:(.*?)^\.Lfunc_end", code, re.S | re.M)
        found.append(Function(name, match[0], body[1] if body else ""))
    assert len([f for f in found if f.name.endswith("_compute_")]) >= len(sources) - 2
    return found


def test_no_sum_of_a_product_is_left_to_llvm(functions: list[Function]) -> None:
    assert [line for function in functions for line in function.bare_products()] == []


def test_the_check_finds_one() -> None:
    bad = "define void @f(float %a) {\n  %1 = fmul <16 x float> %x, %y, !dbg !5\n  %2 = fadd <16 x float> %z, %1, !dbg !6\n}"
    good = bad.replace("fadd <16 x float> %z, %1", "fsub <16 x float> zeroinitializer, %1")
    assert len(list(Function("f", bad, "").bare_products())) == 1
    assert list(Function("f", good, "").bare_products()) == []
    assert list(Function("f", bad.replace("%y", "splat (float 0x3E80000000000000)"), "").bare_products()) == []
    assert len(list(Function("f", bad.replace("%y", "splat (float 3.000000e+00)"), "").bare_products())) == 1


def test_machine_code_fuses_what_the_templates_fuse_and_no_more(functions: list[Function]) -> None:
    wrong = []
    for function in functions:
        written = len(re.findall(r"call [^\n]*@llvm\.fma", function.ir)) + function.num_fusible
        made = len(re.findall(r"\bvfn?m(?:add|sub)\w*", function.code))
        if made > written:
            wrong.append((function.name, written, made))
    assert wrong == []


def test_linears_keep_their_sums_in_registers(functions: list[Function]) -> None:
    linears = [f for f in functions if re.match(r"(linear|gated)", f.name)]
    assert linears
    assert {f.name: f.code.count("Spill") for f in linears if "Spill" in f.code} == {}


def test_no_kernel_allocates_or_calls_the_c_library(functions: list[Function]) -> None:
    called = {name for f in functions for name in re.findall(r"call [^@\n]*@([\w.]+)", f.ir)}
    ours = {f.name for f in functions}
    assert {name for name in called - ours if not name.startswith(("llvm.", "TVMFFIErrorSetRaised"))} == set()


def test_every_kernel_of_the_manifest_is_in_the_library(smollm2: Path, functions: list[Function]) -> None:
    manifest = json.loads((smollm2 / "manifest.json").read_text())
    (target,) = [t for t in manifest["targets"] if t["name"] == ISA.name]
    names = {f.name for f in functions}
    assert {f"__tvm_ffi_{kernel['entry']}" for kernel in target["kernels"].values()} <= names
