"""What the pictures draw: artists' data against numbers from elsewhere, in light and in dark."""

import contextlib
import math
import sys

import matplotlib as mpl
import numpy as np
import pytest
import torch
from bounds import eps
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.optimize import nnls

import functional_jd as jd
from functional_jd import plotting

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.colors import to_rgb
from matplotlib.path import Path as Outline

from functional_jd.plotting.directions import _faces
from functional_jd.plotting.style import look

CONFLICTED = torch.tensor([[3.0, 1.0], [-2.0, 1.0]], dtype=torch.float64)
SPATIAL = torch.tensor([[2.0, 0.3, 0.2], [-1.0, 1.5, 0.1], [0.1, -0.8, 1.8]], dtype=torch.float64)
RULES = {"mean": jd.mean(), "upgrad": jd.upgrad(), "mgda": jd.mgda()}
THEMES = ("default", "dark_background")


@pytest.fixture(autouse=True)
def _no_figures_left():
    yield
    plt.close("all")


@contextlib.contextmanager
def _axes():
    figure, ax = plt.subplots()
    yield ax
    plt.close(figure)


def _infos(steps=12, skipped=(4,), m=2):
    """A history by hand: losses under the names `a`, `b`, ..., and steps at which the last row overflowed."""
    names = "abcdefgh"[:m]
    return [
        jd.StepInfo(
            losses={name: torch.tensor((i + 1) * 0.9**k) for i, name in enumerate(names)},
            weights=torch.tensor([1.0 + i + k for i in range(m)], dtype=torch.float64),
            finite=torch.tensor([k not in skipped or i < m - 1 for i in range(m)]),
        )
        for k in range(steps)
    ]


def _gramian_infos():
    """Three steps of a rule that receives Gramians: a conflict, a skipped step, and no conflict."""
    J = torch.tensor([[3.0, 4.0], [-1.0, 0.0]])
    steps = zip(_infos(3), [J @ J.T, torch.zeros(2, 2), J.abs() @ J.abs().T], (True, False, True), strict=True)
    return [info._replace(gramian=gramian, moved=torch.tensor(moved)) for info, gramian, moved in steps]


def _states(steps=12):
    return [jd.scale_state(2.0 ** (16 - k // 5), shape=(2,)) for k in range(steps)]


QUADRATICS = plotting.quadratics()
ENTRYWISE = [info._replace(weights={"w": torch.ones(2, 3)}) for info in _infos()]
PICTURES = {
    "cone": lambda ax: plotting.cone(CONFLICTED, RULES, ax),
    "cone in space": lambda ax: plotting.cone(SPATIAL, RULES, ax),
    "history": lambda ax: plotting.history(ENTRYWISE, ax=None if ax is None else [ax])[0],
    "trajectories": lambda ax: plotting.trajectories(QUADRATICS._replace(steps=3), {"mean": jd.mean()}, ax),
    "front": lambda ax: plotting.front(
        {"one": torch.rand(9, 2), "two": torch.rand(9, 2)}, None, ax, reference=torch.ones(2)
    ),
}


def _lines(ax):
    return {line.get_label(): line for line in ax.get_lines()}


def _labels(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_reads_in_every_theme_and_leaves_the_rest_alone(name, theme, capsys):
    with plt.style.context(theme):
        before, random_state = dict(plt.rcParams), torch.random.get_rng_state()
        ax = PICTURES[name](None)
        assert dict(plt.rcParams) == before
        assert name == "front" or torch.equal(torch.random.get_rng_state(), random_state)
        assert len(plt.get_fignums()) == 1
        ax.figure.canvas.draw()
        background = np.array(to_rgb(ax.get_facecolor()))
        words = [*ax.texts, ax.xaxis.label, ax.yaxis.label, *ax.get_xticklabels(), *ax.get_yticklabels()]
        legend = ax.get_legend()
        if legend is not None:
            words += legend.get_texts()
            beside, data, sheet = legend.get_window_extent(), ax.patch.get_window_extent(), ax.figure.bbox
            assert beside.x0 >= data.x1 - (30 if ax.name == "3d" else 0)
            assert sheet.x0 <= beside.x0 < beside.x1 <= sheet.x1
        assert all(np.abs(np.array(to_rgb(word.get_color())) - background).min() > 0.8 for word in words)
        assert all(8 <= word.get_fontsize() <= 14 for word in words)
    assert capsys.readouterr() == ("", "")


def _luminance(color):
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    return np.dot(linear, [0.2126, 0.7152, 0.0722])


def test_every_colour_stands_out_on_white_and_on_black():
    for color in plotting.PALETTE:
        light = _luminance(color)
        assert min(1.05 / (light + 0.05), (light + 0.05) / 0.05) > 2.2
    seen = {(style["color"], style["linestyle"]) for style in map(look, range(28))}
    assert len(seen) == 28
    assert len({look(index)["marker"] for index in range(7)}) == 7


def _projection(rows, row):
    """The nearest point of the dual cone, by its multipliers: `row + rows' v` with `v >= 0`."""
    return row + rows.T @ nnls(rows.T, -row)[0]


@pytest.mark.parametrize("rows", [CONFLICTED, SPATIAL, CONFLICTED[:1], SPATIAL[:2]], ids=lambda rows: str(rows.shape))
def test_rules_and_projections_end_where_they_should(rows):
    ax = plotting.cone(rows, RULES)
    matrix = rows.numpy()

    def ends(line):
        return np.stack(line.get_data_3d() if rows.shape[1] == 3 else line.get_data(), 1)

    for name, rule in RULES.items():
        begin, tip = ends(_lines(ax)[name])
        assert not begin.any()
        np.testing.assert_allclose(tip, jd.aggregate(rule, rows).direction, rtol=64 * eps())
    np.testing.assert_allclose(ends(_lines(ax)["mean"])[1], matrix.mean(0))
    projections = [_projection(matrix, row) for row in matrix]
    np.testing.assert_allclose(ends(_lines(ax)["upgrad"])[1], np.mean(projections, 0), atol=2**12 * eps())
    dotted = [ends(line) for line in ax.get_lines() if line.get_linestyle() == ":"]
    moved = [(row, to) for row, to in zip(matrix, projections, strict=True) if not np.allclose(row, to)]
    np.testing.assert_allclose(dotted, np.array(moved).reshape(np.shape(dotted)), atol=2**12 * eps())
    assert _labels(ax) == ["dual cone", *(["projections"] if moved else []), *RULES]


rows_on_the_plane = st.lists(st.tuples(*[st.integers(-4, 4)] * 2), min_size=1, max_size=4)


@given(rows_on_the_plane, st.floats(0, 2 * math.pi))
def test_the_shade_is_the_dual_cone(rows, angle):
    rows, direction = np.array(rows, float), np.array([math.cos(angle), math.sin(angle)])
    heights = rows[rows.any(1)] @ direction
    assume((np.abs(heights) > 1e-2).all())
    with _axes() as ax:
        (shade,) = plotting.cone(torch.tensor(rows), ax=ax).patches
        assert Outline(shade.get_xy()).contains_point(0.5 * direction) == (heights > 0).all()
        half = np.abs([ax.get_xlim(), ax.get_ylim()]).max()
        assert Outline(shade.get_xy()).contains_point(half * direction) == (heights > 0).all()  # to the frame


def test_the_faces_in_space_are_bounded_by_the_rays_of_the_dual_cone():
    matrix = SPATIAL.numpy()
    corners = _faces(matrix, 2.0)
    assert len(corners) == 3
    rays = [np.cross(matrix[i], matrix[j]) for i, j in ((0, 1), (1, 2), (2, 0))]
    rays = [ray * np.sign(matrix[(k + 2) % 3] @ ray) / np.linalg.norm(ray) for k, ray in enumerate(rays)]
    for row, face in zip(matrix, corners, strict=True):
        np.testing.assert_allclose(face @ row, 0, atol=2**12 * eps())
        assert (face @ matrix.T).min() >= -(2**12) * eps()
        length = np.linalg.norm(face, axis=1).max()
        beside = [ray for ray in rays if abs(ray @ row) < 1e-12]
        assert len(beside) == 2
        for ray in beside:
            assert np.linalg.norm(face - length * ray, axis=1).min() < 1e-2 * length


def test_a_training_shows_its_losses_and_where_it_was_skipped():
    def fit(params, target):
        return {"near": (params - target).square().mean(), "far": (params + target).square().mean()}

    parts = {"losses": fit, "aggregator": jd.upgrad(), "optimizer": jd.sgd(0.1)}
    state = jd.train_state(torch.ones(3), torch.ones(3), scale=jd.scale_state(growth_interval=2), **parts)
    infos, states = [], []
    for k in range(6):
        states.append(state.scale)
        state, info = jd.step(state, torch.full((3,), math.inf if k == 2 else 0.5), **parts)
        infos.append(info)
    ax, weights, _, scales, _ = plotting.history(infos, states)
    for name in ("near", "far"):
        drawn = _lines(ax)[name].get_ydata()
        expected = [info.losses[name].item() for info in infos]
        assert np.isnan(drawn[2])
        np.testing.assert_allclose(np.delete(drawn, 2), np.delete(expected, 2), rtol=eps(torch.float32))
    assert list(_lines(ax)["skipped"].get_xdata()) == [2]
    assert _labels(ax) == ["far", "near", "skipped"]
    np.testing.assert_array_equal(_lines(weights)["far"].get_ydata(), [info.weights[0] for info in infos])
    powers = np.array([16, 16, 17, 17, 17, 18])
    np.testing.assert_array_equal(_lines(scales)["all objectives"].get_ydata(), 2.0**powers)
    assert _labels(scales) == ["all objectives", "skipped"]


def test_gramians_in_the_infos_give_norms_and_conflicts():
    drawn = plotting.history(_gramian_infos())
    assert [ax.get_ylabel() for ax in drawn] == ["loss", "weight", "gradient norm", "pairs in conflict (%)"]
    np.testing.assert_allclose(_lines(drawn[2])["a"].get_ydata(), [5.0, np.nan, 5.0])
    np.testing.assert_allclose(_lines(drawn[2])["b"].get_ydata(), [1.0, np.nan, 1.0])
    np.testing.assert_array_equal(drawn[3].get_lines()[0].get_ydata(), [100.0, np.nan, 0.0])


def _residual_infos(m=80, steps=3):
    """The records of residuals at close points, one row per point."""
    x = torch.linspace(0, 1, m, dtype=torch.float64)
    J = torch.stack([torch.cos((k + 1) * x) for k in range(12)], 1)
    J = J * torch.where(torch.arange(m) % 2 == 0, 1.0, -1.0)[:, None]
    residuals = {"edge": x[:2], "inside": x[2:] - 0.5}
    info = jd.StepInfo(
        residuals, torch.ones(m, dtype=torch.float64), torch.ones(m, dtype=torch.bool), torch.tensor(True), J @ J.T
    )
    return [info] * steps, J


def test_the_history_of_residuals_searches_nothing(monkeypatch):
    """A diagnosis of every step took minutes, and warned of a rule that nobody had called."""
    monkeypatch.setattr(sys.modules["functional_jd.diagnostics.diagnose"], "mgda", lambda: pytest.fail("a search"))
    infos, J = _residual_infos()
    *_, conflicts = plotting.history(infos)
    unit = J / J.norm(dim=1, keepdim=True)
    negative = (unit @ unit.T < -1e-12).double().sum() / (80 * 79)
    np.testing.assert_allclose(conflicts.get_lines()[0].get_ydata(), [100 * negative] * 3)


def _bowls(x, y):
    return 0.5 * ((x + 1) ** 2 + 10 * (y + 0.6) ** 2), 0.5 * (10 * (x - 1) ** 2 + (y - 0.6) ** 2)


def test_the_pareto_set_is_what_brute_force_finds():
    problem = QUADRATICS
    (left, bottom), (right, top) = problem.window.tolist()
    mesh = torch.cartesian_prod(torch.linspace(left, right, 141), torch.linspace(bottom, top, 141)).double()
    values, front = torch.vmap(problem.losses)(mesh), torch.vmap(problem.losses)(problem.pareto)
    assert jd.fronts.non_dominated(front).all()
    assert not (values[:, None] < front - 1e-12).all(-1).any()
    # And whatever is on the mesh, some point of the front beats it, up to how far apart these points are.
    span = front.amax(0) - front.amin(0)
    excess = ((front - values[:, None]) / span).amax(-1).amin(1)
    assert excess.max() < (front.diff(dim=0).abs() / span).max() < 0.1
    shortest = jd.aggregate(jd.mgda(), torch.vmap(torch.func.jacrev(problem.losses))(problem.pareto)[50]).direction
    assert shortest.norm() <= 2**22 * eps()


@given(st.floats(1, 100))
def test_the_pareto_set_of_quadratics_is_stationary(condition):
    problem = plotting.quadratics(condition)
    jacobian = torch.vmap(torch.func.jacrev(problem.losses))(problem.pareto)
    crossed = jacobian[:, 0, 0] * jacobian[:, 1, 1] - jacobian[:, 0, 1] * jacobian[:, 1, 0]
    assert crossed.abs().max() < 1e-10 * condition**2
    assert ((jacobian[:, 0] * jacobian[:, 1]).sum(-1) <= 1e-10 * condition).all()


def test_descent_is_the_loop_that_one_would_write():
    problem = plotting.quadratics()
    path = plotting.descend(problem, jd.mean(), optimizer=jd.sgd(0.02, momentum=0.5), steps=20)
    assert path.points.shape == path.losses.shape == (21, 5, 2)
    for number, begin in enumerate(problem.starts):
        point = begin.clone().requires_grad_()
        optimizer = torch.optim.SGD([point], lr=0.02, momentum=0.5)
        for k in range(21):
            losses = torch.stack(_bowls(*point))
            torch.testing.assert_close(path.points[k, number], point.detach())
            torch.testing.assert_close(path.losses[k, number], losses.detach())
            optimizer.zero_grad()
            losses.mean().backward()
            optimizer.step()


def test_no_start_knows_of_the_others_and_every_kind_of_rule_runs():
    problem, key = plotting.quadratics(), jd.random.key(3)
    rules = [jd.upgrad(), jd.pcgrad(key), jd.graddrop(key), jd.nash_mtl(), jd.modo(), jd.famo(), jd.db_mtl()]
    for rule in rules:
        together = plotting.descend(problem, rule, steps=3)
        alone = plotting.descend(problem, rule, steps=3, starts=problem.starts[2:3])
        torch.testing.assert_close(together.points[:, 2:3], alone.points)
        torch.testing.assert_close(together.losses, torch.vmap(torch.vmap(problem.losses))(together.points))


def test_the_area_up_to_the_reference_is_the_hypervolume():
    points, reference = torch.tensor([[0.0, 0.7], [0.4, 0.3], [0.5, 0.9], [0.2, 2.0], [3.0, 0.1]]), torch.ones(2)
    ax = plotting.front(points, reference=reference)
    np.testing.assert_array_equal(_lines(ax)["reference"].get_xydata(), [[1, 1]])
    (area,) = ax.collections
    x, y = area.get_paths()[0].vertices[:-1].T
    shaded = abs(x @ np.roll(y, -1) - y @ np.roll(x, -1)) / 2  # the shoelace formula
    expected = pytest.approx(float(jd.fronts.hypervolume(points, reference)))
    assert shaded == pytest.approx(1 * 0.3 + 0.6 * 0.4) == expected
    assert not plotting.front(points + 2, reference=reference).collections


def test_the_front_has_full_markers_and_the_rest_hollow_ones():
    points = {"one": torch.tensor([[0.0, 3.0], [2.0, 2.0]]), "two": torch.tensor([[1.0, 1.0], [3.0, 0.0], [3.0, 1.0]])}
    ax = plotting.front(points, ["left", "right"])
    lines = _lines(ax)
    np.testing.assert_array_equal(lines["one"].get_xydata(), [[0, 3]])
    np.testing.assert_array_equal(lines["two"].get_xydata(), [[1, 1], [3, 0]])
    np.testing.assert_array_equal(lines["front of the points"].get_xydata(), [[0, 3], [1, 1], [3, 0]])
    hollow = [line.get_xydata().tolist() for line in ax.get_lines() if line.get_markerfacecolor() == "none"]
    assert hollow == [[[2, 2]], [[3, 1]]]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("left", "right")
    assert _labels(plotting.front(points["one"])) == ["front of the points", "on the front"]


# What is wrong: garbage of other kinds is in `tests/fuzz`

WRONG = {
    "at most three rows, found 4 rows of 4 entries": lambda: plotting.cone(torch.ones(4, 4)),
    "found nan or inf in the Jacobian": lambda: plotting.cone(torch.tensor([[1.0, math.nan]])),
    "cone: needs at least one row": lambda: plotting.cone(CONFLICTED[:0]),
    r"front: points 'mine' must be .*\[k, 2\].*\[4, 3\]": lambda: plotting.front({"mine": torch.zeros(4, 3)}),
    r"trajectories: rules must be points \[steps \+ 1, s, 2\] in 'mine', found torch.float32 \[3, 2\]": (
        lambda: plotting.trajectories(QUADRATICS, {"mine": plotting.Path(torch.zeros(3, 2), torch.zeros(3, 2))})
    ),
    "history: expected a list of records, one per step, found St": lambda: plotting.history(_infos()[0]),
    "history: expected a list of records, one per step, found Sc": lambda: plotting.history(_infos(), _states()[0]),
    "each record must be a .*, found 1": lambda: plotting.history([1]),
    "the same objectives at every step": lambda: plotting.history([*_infos(m=2), *_infos(m=3)]),
}


@pytest.mark.parametrize("message", WRONG)
def test_plots_say_what_is_wrong_before_they_make_a_figure(message):
    of_records = TypeError if "record" in message else ValueError
    with pytest.raises(of_records, match=message):
        WRONG[message]()
    assert not plt.get_fignums()
