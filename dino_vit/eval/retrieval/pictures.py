"""Plots of what was found."""

from collections.abc import Mapping
from pathlib import Path

from dino_vit.core.storage import replacing
from dino_vit.eval.disturbances.copies import COPY_KINDS
from dino_vit.eval.retrieval.copies import CopyFigures


def draw_copies(unchanged: CopyFigures, kinds: Mapping[str, Mapping[float, CopyFigures]], path: Path) -> None:
    """Draw recall@1 and micro-AP over the strength, a line for each kind, from the unchanged photo on."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, title in zip(axes, ("recall_at_1", "micro_ap"), strict=True):
        for place, (kind, of_kind) in enumerate(kinds.items()):
            points = [getattr(figures, title) for figures in (unchanged, *of_kind.values())]
            style = {"marker": "os^Dv"[place % 5], "color": f"C{place % 10}", "markersize": 4}
            label = f"{kind}: {COPY_KINDS[kind].describe(*of_kind)}"
            steps = range(len(points))
            axis.plot(steps, [point.percent for point in points], label=label, linewidth=1.5, **style)
            lows, highs = [point.low for point in points], [point.high for point in points]
            axis.fill_between(steps, lows, highs, color=style["color"], alpha=0.08, linewidth=0)
        axis.set(xlabel="strength, from weak to strong", ylim=(-2, 102))
        axis.set_xticks(range(6), ["unchanged", "1", "2", "3", "4", "5"])
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set(title="the nearest image is the original: recall@1 %", ylabel="%")
    axes[1].set(title="one threshold for all pairs: micro-AP %")
    axes[1].legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8, frameon=False)
    with replacing(path) as partial:
        figure.savefig(partial, dpi=130, format="png")
