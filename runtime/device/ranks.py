"""The ranks of a sharded artifact on one machine: a process each, and sockets between the first and every other.

Why sockets and not torch.distributed or shared memory: the runtime may import no torch (law L5); a socket's other end closes when its
process dies, however it dies, so nobody waits for ever; and a reader sleeps until there is something, where a barrier in shared memory
would spin on the cores that the other ranks compute on. A step sends 2 x layers x rows x hidden x 4 bytes each way.

Rank 0 leads: it schedules, drafts, samples, and orders each program run with the step inputs the program reads. Between launches, all
ranks exchange their parts of a sum, always in order of rank, through rank 0: a rank that sends never waits for one that also sends.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from mlsdc.runtime.errors import DeviceError
from mlsdc.runtime.step import Array

WORD = struct.Struct("<q")
GRACE_S = 5.0  # for a rank to end by itself when the leader closes
MODULE = "mlsdc.runtime.device.rank_worker"


class Gone(Exception):
    """The process at the other end has ended."""


def bytes_of(array: Array) -> memoryview:
    """An array's own bytes."""
    return array.reshape(-1).view(np.uint8).data


class Link:
    """A stream of arrays and small JSON messages to one other rank. Raises Gone."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def send(self, data: Array) -> None:
        try:
            self._socket.sendall(bytes_of(data))
        except OSError as error:
            raise Gone(str(error)) from None

    def receive(self, into: Array) -> None:
        view = bytes_of(into)
        while len(view):
            try:
                count = self._socket.recv_into(view)
            except OSError as error:
                raise Gone(str(error)) from None
            if count == 0:
                raise Gone("closed")
            view = view[count:]

    def send_message(self, message: Mapping[str, Any], arrays: Sequence[Array] = ()) -> None:
        text = json.dumps(message).encode()
        self.send(np.frombuffer(WORD.pack(len(text)) + text, np.uint8))
        for array in arrays:
            self.send(array)

    def receive_message(self) -> dict[str, Any]:
        """The message alone: its reader knows which arrays follow."""
        head = np.empty(WORD.size, np.uint8)
        self.receive(head)
        text = np.empty(WORD.unpack(head.tobytes())[0], np.uint8)
        self.receive(text)
        message: dict[str, Any] = json.loads(text.tobytes())
        return message

    def close(self) -> None:
        self._socket.close()


class Ranks:
    """One rank's view of all. `links`: rank 0 has one to each other, in order; another has one, to rank 0."""

    def __init__(self, rank: int, size: int, links: Sequence[Link]) -> None:
        self.rank, self.size, self.links = rank, size, links

    def exchange(self, own: Array, parts: Sequence[Array]) -> None:
        """Fills parts[r], for every rank r, with that rank's `own`; all have the same number of bytes, and do it at the same place.

        Raises DeviceError where a rank has ended.
        """
        parts[self.rank][:] = own
        if self.rank:
            self._talk(0, self.links[0].send, own)
            for rank in range(self.size):
                if rank != self.rank:
                    self._talk(0, self.links[0].receive, parts[rank])
            return
        for rank in range(1, self.size):
            self._talk(rank, self.links[rank - 1].receive, parts[rank])
        for rank in range(1, self.size):
            for other in range(self.size):
                if other != rank:
                    self._talk(rank, self.links[rank - 1].send, parts[other])

    def order(self, message: Mapping[str, Any], arrays: Sequence[Array] = ()) -> None:
        """From rank 0 to all others. Raises DeviceError where one has ended."""
        for rank, link in enumerate(self.links, 1):
            self._talk(rank, link.send_message, message, arrays)

    def _talk(self, rank: int, function: Any, *args: Any) -> None:
        try:
            function(*args)
        except Gone:
            raise DeviceError(f"rank {rank} of {self.size} {self.end_of(rank)}; load the artifact again") from None

    def end_of(self, rank: int) -> str:
        """What is known of a rank's end."""
        return "has ended"

    def close(self) -> None:
        for link in self.links:
            link.close()


class LedRanks(Ranks):
    """Rank 0's view: it starts the others, as child processes, and ends them."""

    def __init__(self, root: Path, target: str, size: int, threads: int) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        links = []
        try:
            for rank in range(1, size):
                here, there = socket.socketpair()
                links.append(Link(here))
                with there:
                    command = [sys.executable, "-m", MODULE, str(root), target, str(rank), str(size), str(threads), str(there.fileno())]
                    self.processes.append(subprocess.Popen(command, pass_fds=(there.fileno(),), stdin=subprocess.DEVNULL))
            super().__init__(0, size, links)
            for rank, link in enumerate(links, 1):
                self._talk(rank, link.receive_message)  # it has loaded
        except OSError as error:
            self._end(links)
            raise DeviceError(f"cannot start the other {size - 1} ranks: {error.strerror or error}") from None
        except BaseException:
            self._end(links)
            raise

    def end_of(self, rank: int) -> str:
        process = self.processes[rank - 1]
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        code = process.returncode
        if code is None:
            return f"(process {process.pid}) has closed its connection"
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}; its message is above"
        return f"(process {process.pid}) {how}"

    def close(self) -> None:
        self._end(self.links)

    def _end(self, links: Sequence[Link]) -> None:
        """A rank ends when its connection closes; one that does not is killed."""
        for link in links:
            link.close()
        for process in self.processes:
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def ranks_of_worker(rank: int, size: int, descriptor: int) -> Ranks:
    """In a process that `LedRanks` started."""
    os.set_inheritable(descriptor, False)
    return Ranks(rank, size, [Link(socket.socket(fileno=descriptor))])
