"""Measuring an artifact on this machine: what a step reads, how fast, and how that compares with reading alone (docs/bench.md)."""

STREAM_BLOCK = 256 << 10  # bytes that a task of an artifact's kernel `stream_read` reads
