"""Plots of the conflicts between objectives, and of training, with matplotlib. Needs the extra `plot`.

Every plot takes `ax=None` and returns the axes. TypeError and ValueError name the argument that does not fit. Legends
stand to the right of the axes: several axes in one figure have room for them with
`plt.subplots(1, 2, layout="constrained")`. `PALETTE` and `legend` give your own matplotlib plots the same style.

The Jacobian of two losses on the plane is a square matrix `[2, 2]`, which `diagnostics.diagnose` reads as a Gramian by
default: call `diagnostics.diagnose(jacobian, direction, gramian=False)`.
"""

from importlib.util import find_spec

if find_spec("matplotlib") is None:
    raise ImportError(
        'functional_jd.plotting: needs matplotlib, found none. Install it: pip install "functional_jd[plot]".'
    )

from functional_jd.plotting.directions import cone
from functional_jd.plotting.front import front
from functional_jd.plotting.history import history
from functional_jd.plotting.style import PALETTE, legend
from functional_jd.plotting.trajectories import Path, Problem, descend, quadratics, trajectories

__all__ = ["PALETTE", "Path", "Problem", "cone", "descend", "front", "history", "legend", "quadratics", "trajectories"]
