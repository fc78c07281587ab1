"""A picture of every function of `functional_jd.plotting`, for its entry in the reference, light and dark.

`python docs/make_pictures.py` draws `demo.svg`, the picture of the README.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

import functional_jd as jd
import functional_jd.__main__ as demo_of_digits
from functional_jd import plotting

ROWS = {"weight": torch.tensor([[2.0, 0.4], [-0.9, 0.6]], dtype=torch.float64)}
RULES = {"mean": jd.mean(), "upgrad": jd.upgrad(), "mgda": jd.mgda()}
THEMES = {"light": "default", "dark": "dark_background"}


def _front(ax: Any = None) -> Any:
    t = torch.linspace(0, 1, 12, dtype=torch.float64)
    points = torch.stack([t.square(), (1 - t).square()], dim=1)
    return plotting.front({"found": points, "others": points[1::2] + 0.15}, ["time", "cost"], ax)


def _training() -> tuple[list[jd.StepInfo], list[jd.precision.ScaleState]]:
    """Sixty steps on two losses in different units, in float16, with a scale for each."""

    def losses(params: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
        out = x @ params["weight"]
        return {"time": (out - x[:, 0]).square().mean(), "cost": 1e-3 * (out + 2 * x[:, 1]).square().mean()}

    params = {"weight": torch.tensor([3.0, -1.0])}
    batches = torch.randn(60, 64, 2, generator=torch.Generator().manual_seed(0))
    method = {"losses": jd.autocast(losses), "aggregator": jd.upgrad(), "optimizer": jd.sgd(0.05)}
    scale = jd.scale_state(2.0**18, growth_interval=12, shape=(2,))
    state = jd.train_state(params, batches[0], scale=scale, **method)
    infos, states = [], []
    for batch in batches:
        states.append(state.scale)
        state, info = jd.step(state, batch, **method)
        infos.append(info)
    return infos, states


def pictures() -> dict[str, Callable[[], Any]]:
    """How each function is called for its picture: it returns axes, or a list of them."""
    infos, states = _training()
    two = {name: RULES[name] for name in ("mean", "upgrad")}
    return {
        "cone": partial(plotting.cone, ROWS, RULES, names=["cost", "time"]),
        "front": _front,
        "history": partial(plotting.history, infos, states),
        "trajectories": partial(plotting.trajectories, plotting.quadratics(), two),
    }


def write(folder: Path) -> list[str]:
    """Draw all of them into a folder as `plot_NAME_light.png` and `plot_NAME_dark.png`; return the names."""
    mpl.use("Agg")
    drawn = pictures()
    for theme, style in THEMES.items():
        with plt.style.context(style), mpl.rc_context({"savefig.transparent": True}):
            for name, draw in drawn.items():
                axes = draw()
                figure = (axes[0] if isinstance(axes, list) else axes).figure
                figure.savefig(folder / f"plot_{name}_{theme}.png", dpi=110)
                plt.close(figure)
    return list(drawn)


def demo(reports: dict[str, Any], file: Path) -> None:
    """Draw what the demo finds, for the README: the learning curves of two tasks, a line for each rule."""
    axes: Any = (figure := Figure(figsize=(7.6, 3.3), layout="constrained")).subplots(1, 2)
    accuracy = "Left digit", 0, 100, "test accuracy (%)", 100
    kinds = accuracy, ("Image", 2, 1, "test error (grey levels), lower is better", None)
    for ax, (title, k, factor, label, top) in zip(axes, kinds, strict=True):
        for rule, report in reports.items():
            values = [factor * results[k] for results in report.results]
            (line,) = ax.plot(range(1, len(values) + 1), values, marker=".")
            ax.annotate(f" {rule}", (len(values), values[-1]), va="center", color=line.get_color())
        ax.set(title=title, xlabel="epoch", ylabel=label, ylim=(0, top))
        ax.margins(x=0.12)
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    with mpl.rc_context({"svg.hashsalt": "demo"}):
        figure.savefig(file, metadata={"Date": None})


if __name__ == "__main__":
    torch.set_num_threads(1)
    settings = demo_of_digits.settings_from(None)
    demo({rule: demo_of_digits.train(rule, settings) for rule in settings.rule}, Path(__file__).parent / "demo.svg")
