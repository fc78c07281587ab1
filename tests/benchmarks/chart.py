"""`python tests/benchmarks/chart.py`: draw `docs/benchmarks.svg` from the CPU table of the page."""

from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
INK, EAGER, COMPILED = "#777777", "#0072B2", "#E69F00"


def cpu_rows(text: str) -> dict[str, dict[str, float]]:
    """The figures of the CPU table of the page, by case and column."""
    made = text.partition(", cpu -->")[2].partition("<!-- end")[0]
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in made.strip().splitlines()]
    return {case: dict(zip(head[1:], map(float, cells), strict=True)) for case, *cells in rows}


def draw(rows: dict[str, dict[str, float]], path: Path) -> None:
    """Two panels, against plain training and against TorchJD: a pair of bars per case, and a line at 1."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    colors = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), INK)
    with mpl.rc_context(colors | {"font.size": 12, "svg.hashsalt": "benchmarks", "svg.fonttype": "none"}):
        figure = Figure(figsize=(9, 6), layout="constrained")
        axes: Any = figure.subplots(1, 2, sharey=True)
        for ax, other in zip(axes, ("plain", "TorchJD"), strict=True):
            for column, color, shift in ((f"to {other}", EAGER, -0.2), (f"to {other}, compiled", COMPILED, 0.2)):
                label = column.partition(", ")[2] or "eager"
                places = [place + shift for place in range(len(rows))]
                ax.barh(places, [row[column] for row in rows.values()], 0.38, color=color, label=label)
            ax.axvline(1, color=INK, linewidth=1.5)
            ax.set(title=f"Time / {'plain training' if other == 'plain' else other}")
            ax.spines[["top", "right"]].set_visible(False)
            ax.patch.set_alpha(0)
        axes[0].set_yticks(range(len(rows)), list(rows))
        axes[0].invert_yaxis()
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
        figure.savefig(path, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    draw(cpu_rows((DOCS / "benchmarks.md").read_text(encoding="utf-8")), DOCS / "benchmarks.svg")
