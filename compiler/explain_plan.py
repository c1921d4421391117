"""What was measured of an artifact's cascade, in words: levels kept and dropped, the tree that pays, predicted beside measured speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mlsdc.compiler.planner import TreeShape, best_tree
from mlsdc.runtime.artifact import Artifact
from mlsdc.runtime.costs import CostTable
from mlsdc.runtime.plan_file import PlanFile

MAX_NODES = 16


def plan_lines(artifact: Artifact, plan: PlanFile) -> Iterator[str]:
    """The plan of `mlsdc tune`, which may be of another artifact or machine (then it says so)."""
    yield f"tuned on {plan.machine}: {plan.prompts} prompts, {plan.tokens} tokens"
    if plan.artifact != artifact.sha256:
        yield f"  it is of another artifact ({plan.artifact[:12]}, this is {artifact.sha256[:12]}): run `mlsdc tune` again"
        return
    chosen = plan.speeds[0]
    off = next((speed for speed in plan.speeds if speed.name == "off"), chosen)
    for level in artifact.manifest.levels[:-1]:
        if level.name in plan.dropped:
            yield f"  {level.name:10} dropped: {plan.dropped[level.name]}"
        else:
            greedy = [rate for rate in plan.rates if rate.level == level.name and not rate.sampled]
            first = f"{100 * greedy[0].hit:.0f} % of first nodes are right, " if greedy else ""
            yield f"  {level.name:10} kept: {first}{1e6 * plan.costs.draft_s.get(level.name, 0.0):.0f} us a draft"
    yield f"  {'predicted':10} {chosen.predicted:.1f} tokens/s, {chosen.predicted / off.predicted:.2f}x of plain decoding"
    if chosen.measured and off.measured:
        yield f"  {'measured':10} {chosen.measured:.1f} tokens/s, {chosen.measured / off.measured:.2f}x of plain decoding"
    context = plan.costs.contexts[0]
    for name, ranks in plan.ranks.items():
        if name in plan.dropped:
            continue
        shape = paying_tree(ranks, plan.costs, context, plan.host_s + plan.costs.draft_s.get(name, 0.0))
        if shape is None:
            yield f"  {name}: no tree of one shape for every step pays; which nodes do is decided step by step"
            continue
        yield f"  {name}: the one tree that pays most for every step, {shape.tokens:.2f} tokens a step (step by step it is better):"
        yield from drawn(shape)
    yield "  other ways to draft, tokens/s predicted and measured"
    for speed in plan.speeds[1:]:
        yield f"    {speed.name:26} {speed.predicted:8.1f}  " + ("not run" if speed.measured is None else f"{speed.measured:8.1f}")


def paying_tree(ranks: Sequence[float], costs: CostTable, context: int, fixed_s: float) -> TreeShape | None:
    """The best of the best trees of 1 .. MAX_NODES nodes by tokens a second; None if none is as fast as no tree."""
    best, speed = None, 1 / (costs.step_s(1, context) + fixed_s)
    for nodes in range(1, MAX_NODES + 1):
        shape = best_tree(ranks, nodes)
        found = shape.tokens / (costs.step_s(1 + nodes, context) + fixed_s)
        if found > speed:
            best, speed = shape, found
    return best


def drawn(shape: TreeShape) -> Iterator[str]:
    """A line a node under the last committed token: the rank among its siblings, and the chance of its path."""
    def below(parent: int, indent: str) -> Iterator[str]:
        children = [node for node, above in enumerate(shape.parents) if above == parent]
        for node in children:
            last = node == children[-1]
            yield f"    {indent}{'└' if last else '├'}─ {shape.ranks[node] + 1}. child, {100 * shape.chances[node]:.0f} %"
            yield from below(node, indent + ("   " if last else "│  "))

    yield "    last committed token"
    yield from below(-1, "")
