"""Pictures of what the objectives do to one another, on matplotlib. Needs the extra `plot`.

Every picture takes `ax=None` and returns the axes. What stands beside them in plain matplotlib looks alike with
`PALETTE`, `look`, `quiet` and `legend`.

On a plane the Jacobian of two losses is one square matrix `[2, 2]`, which `diagnose` takes for a Gramian:
`diagnose(jacobian, direction, gramian=False)` says that it is none.
"""

from importlib.util import find_spec

if find_spec("matplotlib") is None:
    raise ImportError(
        'functional_jd.plotting: needs matplotlib, found none. Install it: pip install "functional_jd[plot]".'
    )

from functional_jd.plotting.cone import cone
from functional_jd.plotting.front import front, nondominated
from functional_jd.plotting.heatmap import heatmap
from functional_jd.plotting.history import conflicts, history, losses, scales, weights
from functional_jd.plotting.problems import PROBLEMS, Path, Problem, descend, fonseca_fleming, quadratics, two_valleys
from functional_jd.plotting.style import PALETTE, legend, look, quiet
from functional_jd.plotting.trajectories import trajectories

__all__ = [
    "PALETTE",
    "PROBLEMS",
    "Path",
    "Problem",
    "cone",
    "conflicts",
    "descend",
    "fonseca_fleming",
    "front",
    "heatmap",
    "history",
    "legend",
    "look",
    "losses",
    "nondominated",
    "quadratics",
    "quiet",
    "scales",
    "trajectories",
    "two_valleys",
    "weights",
]
