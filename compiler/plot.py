"""Pictures of measured figures, drawn by matplotlib (the extra `plot`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mlsdc.runtime.bench.quality import Quality, context_name
from mlsdc.runtime.errors import MlsdcError


def draw_quality(found: Sequence[Quality], file: Path) -> None:
    """Bits of a cached element against KL and the change of perplexity; the file's suffix says the kind of picture. Raises MlsdcError."""
    from matplotlib.figure import Figure

    context = min(found[0].bits, key=lambda context: abs(context - 4096))
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, values, what in ((left, [one.kl for one in found], "mean KL to the 16-bit cache, nats"),
                               (right, [100 * one.change for one in found], "change of perplexity, %")):
        axes.scatter([one.bits[context] for one in found], values)
        for one, value in zip(found, values, strict=True):
            axes.annotate(one.name, (one.bits[context], value), xytext=(5, 4), textcoords="offset points")
        axes.set_xlabel(f"bits of an element at a context of {context_name(context)}")
        axes.set_ylabel(what)
        axes.grid(alpha=0.3)
    left.set_yscale("symlog", linthresh=1e-4)
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise MlsdcError(f"--plot: {file} cannot be drawn: {getattr(error, 'strerror', None) or str(error).splitlines()[0]}") from None
