"""The tables and the plot of few training images and of corrupted images."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dino_vit.commands import format_table
from dino_vit.core.distributed import is_main_process
from dino_vit.eval.accuracy import Accuracy
from dino_vit.eval.classification.robustness import RobustnessConfig, write_plot
from dino_vit.eval.confidence import Interval
from dino_vit.eval.disturbances.corruptions import SEVERITIES


def robustness_tables(config: RobustnessConfig, results: Mapping[str, Any], setting: str) -> list[str]:
    """Return the table by number of images and the one by kind of corruption, as far as there are results."""
    tables = []
    if few := results.get("few_shot"):
        rows = []
        for one in few:
            deviation = "-" if one["standard_deviation"] is None else f"{one['standard_deviation']:.2f}"
            counts = f"{one['shots']:,}", f"{one['images']:,}"
            rows.append([*counts, f"{one[setting]:.3g}", f"{one['mean']:.2f}", deviation])
        header = ["images per class", "images", setting, "top-1 %", f"std of {config.repeats}"]
        tables.append(format_table(header, rows))
    if corrupted := results.get("corruptions"):
        rows = [
            [
                kind.replace("_", " "),
                *(f"{of_severity['percent']:.1f}" for of_severity in one["severities"]),
                str(Interval(**one["mean"])),
            ]
            for kind, one in corrupted["kinds"].items()
        ]
        clean, error = Accuracy(**corrupted["clean"]), Interval(**corrupted["mean_error"])
        by = f" by {corrupted['k']} neighbours" if "k" in corrupted else ""
        title = (
            f"{corrupted['images']:,} images{by}: top-1 {clean} as they are; mean error {error} % when "
            "corrupted, the plain mean of all kinds and severities"
        )
        table = format_table(["top-1 % at severity", *map(str, SEVERITIES), "mean"], rows)
        tables.append(f"{title}\n{table}")
    return tables


def draw_robustness(results: Mapping[str, Any], path: Path) -> list[Path]:
    """Draw what there is beside the JSON, in the first process; return the path of the picture, if any."""
    few, corrupted = results.get("few_shot", []), results.get("corruptions")
    if not few and not corrupted:
        return []
    picture = path.with_name(f"{path.stem}.png" if path.suffix == ".json" else f"{path.name}.png")
    if is_main_process():
        write_plot(few, corrupted, picture)
    return [picture]
