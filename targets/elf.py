"""What a linker would see of an object file: its symbols. Read from the ELF itself, so that any machine can check any other's objects."""

from __future__ import annotations

import struct

SYMBOL = struct.Struct("<IBBHQQ")
UNDEFINED = 0


def symbols(elf: bytes) -> dict[str, int | None]:
    """Named symbols of a 64-bit little-endian ELF file: address, or None where another file must define it. Raises ValueError."""
    if elf[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    table, = struct.unpack_from("<Q", elf, 40)
    entry, count = struct.unpack_from("<HH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQII", elf, table + i * entry) for i in range(count)]
    found: dict[str, int | None] = {}
    for header in headers:
        if header[1] != 2:  # SHT_SYMTAB
            continue
        strings = headers[header[6]][4]
        for at in range(header[4], header[4] + header[5], SYMBOL.size):
            name, _, _, section, value, _ = SYMBOL.unpack_from(elf, at)
            text = elf[strings + name : elf.index(b"\0", strings + name)].decode()
            if text:
                found[text] = None if section == UNDEFINED else value
    return found


def undefined_symbols(elf: bytes) -> frozenset[str]:
    """Names that an object file wants from elsewhere. Raises ValueError."""
    return frozenset(name for name, value in symbols(elf).items() if value is None)
