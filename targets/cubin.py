"""What a cubin says about itself: its parameter table, its registers and spills. Read from the ELF; nothing is run."""

from __future__ import annotations

import re
import struct
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from mlsdc.targets.hardware import MIN_DRIVER, Gpu

PARAM_INFO = 0x17  # EIATTR_KPARAM_INFO: one parameter of a kernel
PARAM_SIZE = 0x19  # EIATTR_CBANK_PARAM_SIZE: bytes of all of them
LOCAL_OPS = ("LDL", "STL")
TENSOR_OPS = ("HMMA", "IMMA", "QMMA", "HGMMA", "IGMMA", "QGMMA", "UTCHMMA", "UTCIMMA", "UTCQMMA")
ASYNC_COPIES = ("LDGSTS", "UTMALDG", "UBLKCP")
BY_LENGTH = 4  # attribute formats: 4 has a length and a payload, the others a 2-byte value


@dataclass(frozen=True)
class Param:
    offset: int
    bytes: int


@dataclass(frozen=True)
class Resources:
    """`local_ops` counts loads and stores of local memory: spills, even where the frame size does not show them.

    `tensor_ops` are instructions of the tensor cores, `async_copies` those that bring data to shared memory past the registers.
    """

    registers: int
    stack_bytes: int
    static_shared_bytes: int
    local_ops: int
    tensor_ops: int
    async_copies: int


def misfit(used: Resources, shared_bytes: int, threads: int, gpu: Gpu) -> str | None:
    """Why a cubin is not good enough for the machine; no compiler checks all of this ahead of time."""
    if used.stack_bytes or used.local_ops:
        return f"spills ({used.stack_bytes} bytes of stack, {used.local_ops} local loads and stores)"
    if shared_bytes > gpu.shared_bytes:
        return f"{shared_bytes} bytes of shared memory, {gpu.shared_bytes} allowed"
    if used.registers * threads > gpu.registers:
        return f"{used.registers} registers x {threads} threads, {gpu.registers} there are"
    return None


def facts(cubin: bytes, used: Resources, shared_bytes: int, threads: int, num_stages: int) -> dict[str, int]:
    """What the manifest says of a kernel (KernelInfo.resources)."""
    return {
        "registers": used.registers, "stack_bytes": used.stack_bytes, "shared_bytes": shared_bytes, "tensor_ops": used.tensor_ops,
        "async_copies": used.async_copies, "threads": threads, "num_stages": num_stages, "elf_abi": elf_abi(cubin),
        "min_driver": MIN_DRIVER[elf_abi(cubin)]}


def elf_abi(cubin: bytes) -> int:
    return cubin[8]


def sections(cubin: bytes) -> dict[str, bytes]:
    """ELF64 sections by name."""
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")
    table, = struct.unpack_from("<Q", cubin, 40)
    entry, count, names = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * entry) for i in range(count)]
    strings = cubin[headers[names][4] :]
    return {strings[h[0] : strings.index(b"\0", h[0])].decode(): cubin[h[4] : h[4] + h[5]] for h in headers}


def params(cubin: bytes, entry: str) -> list[Param]:
    """The kernel's parameters in order, as the driver will copy them. Raises ValueError where there is no such kernel."""
    info = sections(cubin).get(f".nv.info.{entry}")
    if info is None:
        raise ValueError(f"no kernel '{entry}' in the cubin")
    found: dict[int, Param] = {}
    total = None
    at = 0
    while at < len(info):
        format_, attribute, value = struct.unpack_from("<BBH", info, at)
        at += 4
        if attribute == PARAM_SIZE:
            total = value
        if format_ != BY_LENGTH:
            continue
        if attribute == PARAM_INFO:
            _, ordinal, offset, flags = struct.unpack_from("<IHHI", info, at)
            found[ordinal] = Param(offset, flags >> 18)
        at += value
    table = [found[i] for i in sorted(found)]
    if total is not None and table and table[-1].offset + table[-1].bytes != total:
        raise ValueError(f"parameters of '{entry}' end at {table[-1].offset + table[-1].bytes}, the cubin says {total}")
    return table


def resources(cubin: Path, tools: Path) -> Resources:
    """Registers, frame, static shared memory and spills of a file with one kernel, by cuobjdump and nvdisasm in `tools`."""
    usage = _run(tools / "cuobjdump", "--dump-resource-usage", cubin)
    numbers = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED):(\d+)", usage)}
    code = sass(cubin, tools)
    spills, tensor, copies = (sum(count(code, name) for name in names) for names in (LOCAL_OPS, TENSOR_OPS, ASYNC_COPIES))
    return Resources(numbers["REG"], numbers["STACK"], numbers["SHARED"], spills, tensor, copies)


def disassembly(cubin: Path, tools: Path) -> str:
    """The machine code as text."""
    return _run(tools / "nvdisasm", "-c", cubin)


def sass(cubin: Path, tools: Path) -> Counter[str]:
    """How often each instruction stands in the machine code, with its modifiers: `LDGSTS.E.BYPASS.128`."""
    text = disassembly(cubin, tools)
    return Counter(re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", text, re.MULTILINE))


def count(code: Counter[str], opcode: str, modifier: str = "") -> int:
    """Instructions with this opcode, of those with this modifier if one is given."""
    names = [(name.split("."), times) for name, times in code.items()]
    return sum(times for (first, *rest), times in names if first == opcode and (not modifier or modifier in rest))


def _run(*command: object) -> str:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True).stdout
