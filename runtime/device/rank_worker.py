"""The process of a rank other than the first: `python -m mlsdc.runtime.device.rank_worker ROOT TARGET RANK RANKS THREADS DESCRIPTOR`.

Started by the leader (ranks.py), not by people. It ends, silently, when the leader's connection closes.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from mlsdc.runtime.device.cpu_ranks import serve_rank
from mlsdc.runtime.device.ranks import Gone, ranks_of_worker
from mlsdc.runtime.errors import MlsdcError


def main(root: str, target: str, *numbers: str) -> int:
    rank, size, threads, descriptor = map(int, numbers)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the leader's business
    ranks = ranks_of_worker(rank, size, descriptor)
    try:
        serve_rank(Path(root), target, ranks, threads)
    except Gone:
        return 0
    except MlsdcError as error:
        print(f"mlsdc: rank {rank} of {size}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
