"""`mlsdc bench spec --plot`: speed with and without drafts, tokens a step and times of a token by kind of prompt, as a PNG."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlsdc.runtime.bench.spec import SpecReport


def draw(report: SpecReport, path: Path) -> str:
    """Draw it, and say where; says so where matplotlib is not installed."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return "no plot: pip install 'mlsdc[plot]'"
    kinds = list(report.kinds)
    places = range(len(kinds))
    figure, axes = pyplot.subplots(1, 3, figsize=(4 + 1.4 * len(kinds), 3.4))
    for offset, name, values in ((-0.2, "plain", [k.plain_speed for k in kinds]), (0.2, "drafted", [k.speed for k in kinds])):
        axes[0].bar([place + offset for place in places], values, 0.4, label=name)
    for place, kind in zip(places, kinds, strict=True):
        axes[0].text(place, 1.02 * max(kind.speed, kind.plain_speed), f"{kind.ratio:.2f}x", ha="center", fontsize=8)
    axes[0].set(ylabel="tokens/s", title=f"batch {report.batch}, T {report.temperature:g}")
    axes[1].bar(places, [k.length for k in kinds], 0.6, color="tab:green")
    axes[1].set(ylabel="tokens a step")
    for offset, name, values in ((-0.2, "plain p99", [k.plain_p99_ms for k in kinds]), (0.2, "drafted p99", [k.p99_ms for k in kinds])):
        axes[2].bar([place + offset for place in places], values, 0.4, label=name)
    axes[2].set(ylabel="ms a token")
    for axis in axes:
        axis.set_xticks(list(places), [f"{k.cascade} {k.kind}".strip() for k in kinds], rotation=45, ha="right", fontsize=8)
    axes[0].legend(fontsize=8)
    axes[2].legend(fontsize=8)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=110, metadata={"Software": None})
    except OSError as error:
        from mlsdc.runtime.errors import MlsdcError

        raise MlsdcError(f"--plot: {path} cannot be written: {error.strerror}") from None
    finally:
        pyplot.close(figure)
    return f"drawn: {path}"
