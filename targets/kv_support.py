"""Which cache formats run on which target: the support matrix, as data. `mlsdc targets --kv` prints it, a compile refuses its "no" cells.

tests/targets/test_kv_support.py compares every cell with what the targets lower, so that it cannot say more or less than they do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mlsdc.runtime.kv_format import FORMATS, KvGeometry
from mlsdc.targets import TARGETS
from mlsdc.templates.params_triton_kv import TRITON_FORMATS

HEAD_DIMS = (64, 80, 96, 112, 128, 256)
GQA = (1, 3, 8)  # query heads of a kv head; any ratio is like one of these
WINDOWS = (0, 512)  # of positions that a row sees, 0 for all; soft-caps go with both


@dataclass(frozen=True)
class Rule:
    """Cells that a kind of target refuses. Without `formats` or `head_dims`: whatever they are."""

    device: str
    why: str
    formats: tuple[str, ...] = ()
    head_dims: tuple[int, ...] = ()

    def refuses(self, device: str, format: str, head_dim: int) -> bool:
        return self.device == device and (not self.formats or format in self.formats) and (not self.head_dims or head_dim in self.head_dims)


RULES = (
    *(Rule("cuda", f"no Triton kernel reads {name} yet", (name,)) for name in FORMATS if name not in TRITON_FORMATS),
    Rule("cuda", "Triton's blocks are powers of two", head_dims=tuple(dim for dim in range(16, 513, 16) if dim & (dim - 1))),
)


def device_of(target: str) -> str:
    """`cpu` or `cuda`, by the target's table entry."""
    return "cpu" if TARGETS[target].where.endswith(":cpu_target") else "cuda"


def refused(target: str, format: str, head_dim: int) -> str:
    """Why a target cannot run a format at a head_dim, "" if it can. Any GQA ratio, window and soft-cap goes with every cell."""
    return next((rule.why for rule in RULES if rule.refuses(device_of(target), format, head_dim)), "")


def refused_geometry(target: str, kv: KvGeometry) -> str:
    """The same for a level's pages, whose layers may differ: the layer and why, "" if the target runs all of them."""
    for layer in range(kv.num_layers):
        format = kv.layer_format(layer)
        for half in (format.keys.name, format.values.name):
            if why := refused(target, half, kv.head_dim):
                return f"layer {layer}: {half} at head_dim {kv.head_dim}: {why}"
    return ""


def matrix() -> Iterator[str]:
    """The table, a line a kind of target and format; `yes`, or the number of the reason below."""
    reasons: list[str] = []
    yield f"{'kind':6} {'format':12} " + " ".join(f"{dim:>5}" for dim in HEAD_DIMS) + "   head_dim"
    for device, target in (("cpu", "cpu-native"), ("cuda", "h100")):
        for name in FORMATS:
            cells = []
            for dim in HEAD_DIMS:
                why = refused(target, name, dim)
                if why and why not in reasons:
                    reasons.append(why)
                cells.append(f"{'no ' + str(reasons.index(why) + 1) if why else 'yes':>5}")
            yield f"{device:6} {name:12} {' '.join(cells)}"
    yield "any number of query heads a kv head, sliding windows and soft-caps go with every yes"
    yield from (f"no {i}: {why}" for i, why in enumerate(reasons, 1))
