"""Runs the CPU target's aarch64 kernels under qemu-user: cpu_machine.Machine, whose calls happen in another process.

Kernels and walker are linked with a few lines of LLVM IR into a static program: no C compiler and no aarch64 libc. A call's memory
travels as an image that both sides see at the same address, so pointers in argument tables are made here.
"""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest

from mlsdc.compiler.graph import Graph
from mlsdc.runtime.step import Limits
from mlsdc.targets.cpu import CpuTarget
from mlsdc.targets.cpu_build import ENTRY, compile_kernels, compile_walker, linkers, load_function, walker_source
from mlsdc.targets.cpu_isa import CpuIsa
from mlsdc.targets.elf import symbols
from mlsdc.targets.protocol import KernelSpec
from mlsdc.templates.render import render
from tests.once import once
from tests.targets.cpu_machine import FLOAT, INT, POINTER, Array, Machine, specs_of

QEMU = next((tool for tool in ("qemu-aarch64-static", "qemu-aarch64") if shutil.which(tool)), None)
PAGE = 4096
BASE = 1 << 32  # where the image lies; its first words: function, arguments, count, result, bytes of the image, status, last system call
WORDS = struct.Struct("<7Q")

HARNESS = r"""
target triple = "aarch64-unknown-linux-gnu"

define internal i64 @sys(i64 %n, i64 %a, i64 %b, i64 %c, i64 %d, i64 %e, i64 %f) noinline {
  %r = call i64 asm sideeffect "svc #0", "={x0},{x8},{x0},{x1},{x2},{x3},{x4},{x5},~{memory}"(
    i64 %n, i64 %a, i64 %b, i64 %c, i64 %d, i64 %e, i64 %f)
  ret i64 %r
}

; libc's, for the walker: it makes the call and notes its number
define i64 @syscall(i64 %n, i64 %a, i64 %b, i64 %c, i64 %d, i64 %e, i64 %f) {
  store i64 %n, ptr inttoptr (i64 4294967344 to ptr)
  %r = call i64 @sys(i64 %n, i64 %a, i64 %b, i64 %c, i64 %d, i64 %e, i64 %f)
  ret i64 %r
}

define i32 @sched_yield() {
  ret i32 0
}

define void @TVMFFIErrorSetRaisedFromCStrParts(ptr %kind, ptr %parts, i32 %n) {
  ret void
}

define ptr @memcpy(ptr %to, ptr %from, i64 %n) "no-builtins" {
entry:
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %next, %body ]
  %more = icmp ult i64 %i, %n
  br i1 %more, label %body, label %out
body:
  %p = getelementptr i8, ptr %from, i64 %i
  %q = getelementptr i8, ptr %to, i64 %i
  %x = load volatile i8, ptr %p
  store volatile i8 %x, ptr %q
  %next = add i64 %i, 1
  br label %loop
out:
  ret ptr %to
}

define ptr @memset(ptr %to, i32 %x, i64 %n) "no-builtins" {
entry:
  %byte = trunc i32 %x to i8
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %next, %body ]
  %more = icmp ult i64 %i, %n
  br i1 %more, label %body, label %out
body:
  %q = getelementptr i8, ptr %to, i64 %i
  store volatile i8 %byte, ptr %q
  %next = add i64 %i, 1
  br label %loop
out:
  ret ptr %to
}

define void @_start() noreturn {
entry:
  ; mmap(BASE, 1 GiB, READ | WRITE, PRIVATE | FIXED | ANONYMOUS | NORESERVE, -1, 0)
  %mapped = call i64 @sys(i64 222, i64 4294967296, i64 1073741824, i64 3, i64 16434, i64 -1, i64 0)
  br label %read
read:
  %at = phi i64 [ 4294967296, %entry ], [ %after, %read ]
  %got = call i64 @sys(i64 63, i64 0, i64 %at, i64 1048576, i64 0, i64 0, i64 0)
  %after = add i64 %at, %got
  %some = icmp sgt i64 %got, 0
  br i1 %some, label %read, label %run
run:
  %function = load ptr, ptr inttoptr (i64 4294967296 to ptr)
  %args = load ptr, ptr inttoptr (i64 4294967304 to ptr)
  %count = load i32, ptr inttoptr (i64 4294967312 to ptr)
  %result = load ptr, ptr inttoptr (i64 4294967320 to ptr)
  %status = call i32 %function(ptr null, ptr %args, i32 %count, ptr %result)
  %wide = sext i32 %status to i64
  store i64 %wide, ptr inttoptr (i64 4294967336 to ptr)
  %end = load i64, ptr inttoptr (i64 4294967328 to ptr)
  br label %write
write:
  %out = phi i64 [ 0, %run ], [ %next, %write ]
  %from = add i64 %out, 4294967296
  %left = sub i64 %end, %out
  %put = call i64 @sys(i64 64, i64 1, i64 %from, i64 %left, i64 0, i64 0, i64 0)
  %next = add i64 %out, %put
  %more = icmp ult i64 %next, %end
  br i1 %more, label %write, label %done
done:
  %gone = call i64 @sys(i64 94, i64 0, i64 0, i64 0, i64 0, i64 0, i64 0)
  unreachable
}
"""


class QemuMachine(Machine):
    """Kernels of some graphs in a static aarch64 program."""

    def __init__(self, target: CpuTarget, folder: Path) -> None:
        self.target = target
        self.folder = folder
        self.program = folder / "program"
        self.symbols = symbols(self.program.read_bytes())

    @staticmethod
    def build(factory: pytest.TempPathFactory, name: str, limits: Limits, graphs: Iterable[Graph], isa: CpuIsa) -> QemuMachine:  # type: ignore[override]
        """Skips where there is no qemu or nothing that links."""
        tools = linkers(isa.arch)
        if QEMU is None:
            pytest.skip("no qemu-aarch64 (apt install qemu-user-static)")
        if not tools:
            pytest.skip("no linker for aarch64 (apt install binutils-aarch64-linux-gnu)")
        target = CpuTarget(isa, limits)
        specs = [spec for graph in graphs for spec in specs_of(target, graph)]
        return QemuMachine(target, once(factory, name, lambda folder: link_program(isa, specs, folder, tools[0])))

    def call(self, spec: KernelSpec, lo: int, hi: int, args: Sequence[int | float | Array]) -> None:
        status, _ = self.execute(ENTRY + spec.key, [lo, hi, *args])
        if status:
            raise RuntimeError(f"{spec.key} refused its arguments")

    def execute(self, symbol: str, args: Sequence[int | float | Array]) -> tuple[int, int]:
        """(status, last system call) of one function; arrays are changed in place. Arrays may overlap."""
        places: list[list[int]] = []  # [start, end, address in the image] of memory here
        for start, end in sorted((a.ctypes.data, a.ctypes.data + a.nbytes) for a in args if isinstance(a, np.ndarray)):
            if places and start <= places[-1][1]:
                places[-1][1] = max(places[-1][1], end)
            else:
                places.append([start, end, 0])
        table = np.zeros((len(args), 2), np.int64)
        at = BASE + PAGE + -(-table.nbytes // PAGE) * PAGE
        for place in places:
            place[2] = at + place[0] % PAGE
            at += -(-(place[0] % PAGE + place[1] - place[0]) // PAGE) * PAGE
        for row, arg in zip(table, args, strict=True):
            if isinstance(arg, float):
                row[0] = FLOAT
                row[1:].view(np.float64)[0] = arg
            elif isinstance(arg, int):
                row[:] = INT, arg
            else:
                start, _, image_at = next(place for place in places if place[0] <= arg.ctypes.data < place[1])
                row[:] = POINTER, image_at + arg.ctypes.data - start
        image = np.zeros(at - BASE, np.uint8)
        words = self.symbols[symbol] or 0, BASE + PAGE, len(args), BASE + 64, image.nbytes, 1, 0
        image[: WORDS.size] = np.frombuffer(WORDS.pack(*words), np.uint8)
        image[PAGE : PAGE + table.nbytes] = table.reshape(-1).view(np.uint8)
        for start, end, image_at in places:
            image[image_at - BASE :][: end - start] = memory_at(start, end)
        assert QEMU is not None
        done = subprocess.run([QEMU, "-cpu", "max", self.program], input=image.tobytes(), capture_output=True, check=True)
        back = np.frombuffer(done.stdout, np.uint8)
        for start, end, image_at in places:
            memory_at(start, end)[:] = back[image_at - BASE :][: end - start]
        _, _, _, _, _, status, system_call = WORDS.unpack_from(done.stdout)
        return status, system_call


def memory_at(start: int, end: int) -> Array:
    """Bytes of this process."""
    array: Array = np.ctypeslib.as_array((ctypes.c_uint8 * (end - start)).from_address(start))
    return array


def link_program(isa: CpuIsa, specs: Sequence[KernelSpec], folder: Path, linker: Sequence[str]) -> None:
    functions = {}
    for spec in {spec.key: spec for spec in specs}.values():
        source = folder / f"{spec.key}.py"
        source.write_text(render(f"tir/{spec.template}.py.jinja", spec=spec, p=spec.params, isa=isa), encoding="utf-8")
        functions[spec.key] = load_function(source, spec)
    for name, text in (("walker", walker_source(isa)), ("harness", HARNESS)):
        (folder / f"{name}.ll").write_text(text, encoding="utf-8")
        compile_walker(folder / f"{name}.ll", folder / f"{name}.o")
    compile_kernels(isa, functions, folder / "kernels.o")
    objects = ["harness.o", "kernels.o", "walker.o"]
    static = ["-static", "-nostdlib"] if "-m" in linker else ["-static"]
    subprocess.run([*linker, *static, "-o", "program", *objects], cwd=folder, check=True, capture_output=True)
