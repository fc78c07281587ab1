"""What the pages of recipes say beside their blocks, which test_readme runs."""

import copy
import csv
import re
import sys
import warnings
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import optree
import pytest
import torch
from bounds import check_same, check_within, eps
from numpy.polynomial import Chebyshev
from pages import blocks, typed
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import functional_jd as jd

ROOT = Path(__file__).parents[1]
GUIDES = ROOT / "docs" / "guides"


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """What the reader of the recipes has after all blocks."""
    module = ModuleType("reader")
    session = vars(module)
    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng():
        patch.setitem(sys.modules, "reader", module)  # where torch.compile looks for what is global
        patch.chdir(tmp_path_factory.mktemp("reader"))
        torch.manual_seed(0)
        for block in blocks(GUIDES / "recipes.md"):
            exec(compile(block, "recipes", "exec"), session)
        session["table"] = [*csv.reader(Path("losses.csv").read_text(encoding="utf-8").splitlines())]
    return session


def test_the_table_of_losses_has_a_row_for_every_tenth_step(shown):
    head, *rows = shown["table"]
    assert head == ["step", "kind", "price", "taken"]
    assert [int(row[0]) for row in rows] == [0, 10]
    assert all(torch.tensor([float(x) for x in row[1:3]]).isfinite().all() for row in rows)


def test_what_is_reported_to_tensorboard_is_what_the_step_found(shown):
    written = {}

    class Writer:
        def add_scalar(self, tag, scalar_value, global_step):
            assert global_step == 7
            written[tag] = scalar_value

    info, scale = one_step(shown, jd.upgrad())
    shown["report"](Writer(), 7, info, scale)
    assert written["losses/price"] == info.losses["price"].item()
    assert written["weights/kind"] == info.weights[0].item()
    assert written["scales/kind"] == scale.scale[0].item()
    assert written["skipped"] == 1 - info.moved.item()
    assert written["diagnosis/rank"] == jd.diagnostics.diagnose(info.gramian, info.weights).rank.item()
    written.clear()
    shown["report"](Writer(), 7, *one_step(shown, jd.mean()))
    assert not [tag for tag in written if tag.startswith("diagnosis")], "no gradients were looked at"


PYTREES = {
    "graddrop": lambda: jd.graddrop(jd.random.key(0)),
    "trimmed_mean": lambda: jd.trimmed_mean(0),
    "db_mtl": jd.db_mtl,
    "moco": jd.moco,
    "grouped": lambda: jd.grouped({"trunk": jd.upgrad(), "kind": jd.mean(), "price": jd.mean()}),
}


@pytest.mark.parametrize("name", PYTREES)
def test_weights_that_are_a_pytree_are_not_reported_under_names_of_losses(shown, name):
    written, (info, scale) = {}, one_step(shown, PYTREES[name]())
    writer = SimpleNamespace(add_scalar=lambda tag, value, index: written.update({tag: value}))
    shown["report"](writer, 0, info, scale)
    assert written.keys() == {"losses/kind", "losses/price", "scales/kind", "scales/price", "skipped"}
    assert not isinstance(info.weights, torch.Tensor)
    pages = [GUIDES / "recipes.md", GUIDES / "diagnose.md"]
    assert all(re.search(rf"\b{name}\b", page.read_text(encoding="utf-8")) for page in pages)
    if name == "grouped":
        assert info.weights["trunk"].shape == (2,)


def one_step(shown, rule):
    batch = batch_of(shown)
    how = {"losses": shown["losses"], "aggregator": rule, "optimizer": jd.sgd(0.1)}
    state = jd.train_state(shown["params"], *batch, scale=jd.scale_state(2.0, shape=(2,)), **how)
    state, info = jd.step(state, *batch, **how)
    return info, state.scale


def test_the_moving_average_is_that_of_torch(shown):
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    original = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    original.update_parameters(net)  # the first one copies
    average = {name: p.detach().clone() for name, p in net.named_parameters()}
    largest = 0.0
    for _ in range(5):
        with torch.no_grad():
            for p in net.parameters():
                p += torch.randn_like(p)
                largest = max(largest, float(p.abs().max()))
        original.update_parameters(net)
        average = shown["averaged"](average, dict(net.named_parameters()), 0.9)
    rounding = 5 * 4 * torch.finfo(torch.float32).eps * largest  # five averages of two products
    torch.testing.assert_close(average, dict(original.module.named_parameters()), rtol=0, atol=rounding)


def test_every_field_is_explained():
    page = (GUIDES / "diagnose.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|", page.partition("## Every field")[2], flags=re.MULTILINE)
    assert rows == [*jd.diagnostics.Diagnosis._fields, *jd.StepInfo._fields]


def test_a_compiled_part_of_the_losses_costs_the_vmap_and_changes_nothing():
    torch._dynamo.reset()
    p, x = {"w": torch.randn(8, 8)}, torch.randn(16, 8)
    losses = lambda inner: lambda p, x: inner(x @ p["w"]).square().mean(0)
    how = {"aggregator": jd.upgrad(), "optimizer": jd.sgd(0.1)}
    found = {}
    for inner in (torch.sin, torch.compile(lambda h: h.sin(), backend="aot_eager")):
        how["losses"] = losses(inner)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found[inner] = jd.step(jd.train_state(p, x, **how), x, **how)[0].params
        slow = [each for each in told if each.category is jd.SlowPathWarning]
        assert ("one row after the other" in "".join(str(each.message) for each in slow)) == (inner is not torch.sin)
    torch.testing.assert_close(*found.values())


def test_an_average_of_the_labels_that_are_known_is_that_of_these_examples(shown):
    params = shown["params"]
    x, kind, price = (shown[name].clone() for name in ("x", "kind", "price"))
    few, some = torch.arange(len(x)) % 3 == 0, torch.arange(len(x)) % 2 == 0
    values = shown["losses"](params, x[few], kind[few], price[few])["kind"]
    others = shown["losses"](params, x[some], kind[some], price[some])["price"]
    kind[~few], price[~some] = -1, torch.nan
    jacobian, found = jd.jacobian_fn(shown["partly"])(params, x, kind, price)
    torch.testing.assert_close(found, {"kind": values, "price": others})
    assert all(leaf.isfinite().all() for part in jacobian.values() for leaf in part.values())
    assert shown["info"].moved


def test_teachers_and_queues_move_as_they_do_by_hand(shown):
    start, carried, x = shown["start"], shown["carried"], shown["x"]
    other = x + 0.5
    moved = {name: p + 1 for name, p in start.items()}
    _, buffers = shown["contrastive"](moved, carried, x, other)
    for name, p in buffers["teacher"].items():
        torch.testing.assert_close(p, 0.99 * start[name] + 0.01 * moved[name])
    spoken = functional.normalize(torch.func.functional_call(shown["trunk"], buffers["teacher"], other), dim=1)
    torch.testing.assert_close(buffers["queue"], torch.cat([spoken, carried["queue"][:-32]]))


def test_codes_follow_the_mean_of_their_members(shown):
    book, x = shown["book"], shown["x"]
    z = torch.func.functional_call(shown["trunk"], shown["start"], x)
    nearest = [min(range(16), key=lambda k, h=h: float((h - book["codes"][k]).norm())) for h in z]
    losses, buffers = shown["quantized"](shown["start"], book, x)
    for k in range(16):
        members = z[torch.tensor(nearest) == k]
        counts = 0.99 * book["counts"][k] + 0.01 * len(members)
        sums = 0.99 * book["sums"][k] + 0.01 * members.sum(0)
        torch.testing.assert_close(buffers["codes"][k], sums / (counts + 1e-5))
    chosen = book["codes"][nearest]
    torch.testing.assert_close(losses["commitment"], (z - chosen).square().mean())


def test_weighted_residuals_have_the_sum_of_means_as_their_sum_of_squares(shown):
    for block in blocks(GUIDES / "physics.md", 0, 4):
        exec(compile(block, "physics", "exec"), shown)
    params = {"w": torch.randn(8, 1), "b": torch.randn(8), "v": torch.randn(1, 8)}
    points, values = shown["points"], shown["values"]
    plain = jd.per_example(shown["parts"])(params, points, values)
    found = shown["equation"](params, points, values)
    expected = plain["inside"].square().mean() + 10 * plain["edge"].square().mean()
    torch.testing.assert_close(sum(leaf.square().sum() for leaf in found.values()), expected)


def test_the_schedule_is_that_of_torch(shown):
    schedulers, optimizer = torch.optim.lr_scheduler, torch.optim.SGD([torch.zeros(1)], lr=1e-3)
    warmup, rest = schedulers.LinearLR(optimizer, 0.01, total_iters=99), schedulers.CosineAnnealingLR(optimizer, 900)
    original = schedulers.SequentialLR(optimizer, [warmup, rest], milestones=[100])
    for steps in range(1001):
        if steps % 50 in (0, 49):
            found = float(shown["schedule"](torch.tensor(steps)))
            expected = optimizer.param_groups[0]["lr"]
            assert abs(found - expected) <= 64 * eps(torch.float32) * (expected + 1e-5)  # a cosine near its end cancels
        optimizer.step()
        original.step()


def test_steps_are_counted_where_the_page_of_the_current_rate_says(shown):
    page = (GUIDES / "recipes.md").read_text(encoding="utf-8")
    section = page.partition("## The current rate")[2].partition("\n## ")[0]
    by_group, measured = re.findall(r"`(state\.optimizer\[.*?)`", section)
    batch = shown["x"], shown["kind"], shown["price"]
    for words, method in ((by_group, shown["grouped"]), (measured, shown["watched"])):
        how = method | {"losses": shown["losses"]}
        state, _ = jd.step(jd.train_state(shown["params"], *batch, **how), *batch, **how)
        assert int(eval(words, {"state": state})) == 1


def trained(shown, state, method, steps):
    for _ in range(steps):
        state, _ = jd.step(state, *batch_of(shown), **method)
    return state


def test_the_whole_of_trunk_and_heads_is_what_autograd_finds(shown):
    model, split = copy.deepcopy(shown["model"]), jd.random.split
    start = jd.train_state(
        shown["pieces"], *batch_of(shown), buffers={"key": jd.random.key(0), **shown["kept"]}, **shown["complete"]
    )
    model.trunk.load_state_dict(shown["pieces"]["shared"] | shown["kept"]["trunk"])
    for name, head in model.heads.items():
        head.load_state_dict(shown["pieces"]["heads"][name] | shown["kept"]["heads"][name])
    optimizer, key = torch.optim.AdamW(model.parameters(), lr=1e-3), jd.random.key(0)
    state = trained(shown, start, shown["complete"], 3)
    for _ in range(3):  # the modules themselves, with masks of the same keys
        now, key = split(key)
        h = jd.random.keyed(model.trunk)(now, shown["x"])
        key, *keys = split(key, 3)
        out = {name: jd.random.keyed(head)(now, h) for now, (name, head) in zip(keys, model.heads.items(), strict=True)}
        values = [
            functional.cross_entropy(out["kind"], shown["kind"]),
            functional.mse_loss(out["price"], shown["price"]),
        ]
        rows = [torch.autograd.grad(value, [*model.trunk.parameters()], retain_graph=True) for value in values]
        found = jd.aggregate(jd.upgrad(), [torch.stack(column) for column in zip(*rows, strict=True)])
        optimizer.zero_grad()
        sum(values).backward()
        for p, direction in zip(model.trunk.parameters(), found.direction, strict=True):
            p.grad = direction
        optimizer.step()
    ordered = lambda named: dict(sorted(named.items()))
    check_same(ordered(state.params["shared"] | state.buffers["trunk"]), ordered(model.trunk.state_dict()))
    for name, head in model.heads.items():
        ours = {**state.params["heads"][name], **state.buffers["heads"][name]}
        check_same(ordered(ours), ordered(head.state_dict()))
    assert torch.equal(state.buffers["key"], key)
    assert not torch.equal(state.params["shared"]["0.weight"], shown["pieces"]["shared"]["0.weight"])


def test_a_phase_without_the_trunk_is_plain_training_of_the_heads(shown):
    heads, backbone = copy.deepcopy(shown["heads"]), copy.deepcopy(shown["backbone"]).eval()
    for name, head in heads.items():
        head.load_state_dict(shown["whole"]["heads"][name])
    optimizer = torch.optim.AdamW(heads.parameters(), lr=1e-3)
    shown["backbone"].eval()
    start = jd.train_state(
        {"heads": shown["whole"]["heads"]}, *batch_of(shown), buffers=shown["frozen"], **shown["alone"]
    )
    phase = trained(shown, start, shown["alone"], 3)
    shown["backbone"].train()
    for _ in range(3):
        optimizer.zero_grad()
        with torch.no_grad():
            h = backbone(shown["x"])
        loss = functional.cross_entropy(heads["kind"](h), shown["kind"])
        (loss + functional.mse_loss(heads["price"](h), shown["price"])).backward()
        optimizer.step()
    expected = {name: dict(head.named_parameters()) for name, head in heads.items()}
    torch.testing.assert_close(phase.params["heads"], expected)
    torch.testing.assert_close(phase.buffers, shown["frozen"], rtol=0, atol=0)
    assert shown["melted"].optimizer["heads"].steps == 2
    assert shown["melted"].optimizer["shared"].steps == 1


def batch_of(shown):
    return shown["x"], shown["kind"], shown["price"]


def test_held_weights_in_a_loop_are_those_of_every_eighth_step(shown):
    page, calls = blocks(ROOT / "docs" / "rules.md"), []
    session = shown | {name: copy.deepcopy(shown[name]) for name in ("trunk", "heads")}
    session["jd"] = SimpleNamespace(**vars(jd) | {"weights_fn": lambda losses, rule: recorded(losses, rule, calls)})
    session["fresh"], session["repeated"] = jd.held(jd.config())
    (loop,) = [code for code in page if "weights_fn" in code]
    exec(compile(loop, "cheaper", "exec"), session)
    weights = [each for each, _ in calls]
    assert len(weights) == 16
    for i, each in enumerate(weights):
        assert torch.equal(each, weights[i - i % 8])
    assert not torch.equal(weights[0], weights[8])
    for i in (0, 8):
        rows, values = jd.jacobian_fn(shown["losses"])(calls[i][1], *(shown[name] for name in ("x", "kind", "price")))
        expected = jd.aggregate(jd.config(), rows, losses=values).weights
        check_within(weights[i], expected, 64 * eps(torch.float32) * expected.abs().max())


def recorded(losses, rule, calls):
    f = jd.weights_fn(losses, rule)

    def call(params, *batch, state):
        found = f(params, *batch, state=state)
        calls.append((found.weights, optree.tree_map(lambda p: p.detach().clone(), params)))
        return found

    return call


@pytest.fixture(scope="module")
def physicist():
    """What the reader of the page on equations has."""
    return typed(GUIDES / "physics.md")


def test_a_system_has_the_same_residuals_by_names_and_as_vectors(physicist):
    weights = {"w": torch.randn(8, 1), "b": torch.randn(8), "v": torch.randn(2, 8)}
    t = torch.linspace(0, 1, 60)[:, None]
    by_name = physicist["system"](weights, {"u": t, "v": t})
    vectors = physicist["vectors"](weights, t)["equations"]
    assert vectors.shape == (60, 2)
    torch.testing.assert_close(torch.stack([by_name["u"], by_name["v"]], 1), vectors)
    u = lambda t: weights["v"] @ torch.tanh(weights["w"] @ t + weights["b"])
    slope, value = torch.func.jacrev(u)(t[7])[:, 0], u(t[7])
    torch.testing.assert_close(vectors[7], torch.stack([slope[0] - value[1], slope[1] + value[0]]))


@pytest.mark.filterwarnings("error::functional_jd.SlowPathWarning")
@pytest.mark.parametrize("name", ["system", "vectors"])
def test_a_system_with_jvp_is_one_graph(physicist, name):
    """`matrix @ vector` in a `jvp` was differentiated example by example, or refused."""
    shapes = {"w": (8, 1), "b": (8,), "v": (2, 8)}
    weights = {name: torch.randn(*shape, dtype=torch.float64) for name, shape in shapes.items()}
    t = torch.linspace(0, 1, 12, dtype=torch.float64)[:, None]
    points = {"u": t, "v": t} if name == "system" else t
    how = physicist["solve"] | {"losses": physicist[name]}
    state = jd.train_state(weights, points, **how)
    found, _ = jd.compiled(partial(jd.step, **how), backend="eager")(state, points)
    expected, _ = jd.step(state, points, **how)
    for name, leaf in expected.params.items():
        assert torch.equal(found.params[name], leaf)


def test_residuals_in_the_plane_are_those_of_the_hessian(physicist):
    weights = {"w": torch.randn(8, 2), "b": torch.randn(8), "v": torch.randn(1, 8)}
    x, normal = torch.rand(2), torch.tensor([-1.0, 0.0])
    field = lambda x: physicist["wave"](weights, x)
    torch.testing.assert_close(physicist["laplacian"](weights, x), torch.func.hessian(field)(x).trace())
    torch.testing.assert_close(physicist["flux"](weights, x, normal, 2.0), -torch.func.grad(field)(x)[0] - 2)
    assert {name: len(r) for name, r in physicist["poisson"].items()} == {"inside": 32, "side": 8, "average": 1}


def test_an_integral_in_every_residual_takes_its_grid_from_around_it(physicist):
    page = (GUIDES / "physics.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"`(lambda params, x: slope.*?)`", page)
    weights = {"w": torch.randn(8, 1), "b": torch.randn(8), "v": torch.randn(1, 8)}
    x, grid = torch.rand(5, 1), torch.rand(7, 1)
    wave = physicist["wave"]
    slope = lambda params, x: torch.func.grad(wave, 1)(params, x)[0]
    found = jd.per_example(eval(code, physicist | {"slope": slope, "grid": grid}))(weights, x)
    average = torch.stack([wave(weights, at) for at in grid]).mean()
    torch.testing.assert_close(found, torch.stack([slope(weights, at) - average for at in x]))


def test_the_solution_and_the_coefficient_are_found(physicist):
    x = torch.linspace(0, 1, 11)[:, None]
    found = torch.vmap(lambda x: physicist["wave"](physicist["solving"].params, x))(x)
    assert float((found - x[:, 0].sin()).detach().abs().max()) < 1e-3
    assert float(sum(r.square().sum() for r in physicist["elsewhere"].values())) < 1e-5
    assert float(physicist["finding"].params["k"]) == pytest.approx(4, abs=0.01)
    assert physicist["info"].gramian is not None


def by_collocation(physicist):
    """The covariance row of "k" with twelve polynomials in the place of the network: one number for each residual."""
    best, sigma = physicist["best"], physicist["sigma"]
    x, k = np.linspace(0, 2, 30), float(best["k"])
    curve = torch.vmap(partial(physicist["wave"], best))(torch.from_numpy(x)[:, None]).numpy()
    seen = physicist["places"]["seen"][:, 0].numpy()
    basis = [Chebyshev.basis(degree, domain=[0, 2]) for degree in range(12)]
    equation = np.stack([*(each.deriv(2)(x) + k * each(x) for each in basis), curve], 1) / 0.05
    data = np.stack([*(each(seen) for each in basis), 0 * seen], 1) / sigma
    return np.linalg.pinv(np.concatenate([equation, data]))[-1]


def test_the_error_bar_is_that_of_collocation(physicist):
    expected = float(np.linalg.norm(by_collocation(physicist)))
    for found in (physicist["deviation"](100), physicist["deviation"](200), physicist["deviation"](100, prior=10.0)):
        assert float(found) == pytest.approx(expected, rel=0.02)


def test_norms_of_layers_in_the_guide_to_objectives_are_those_of_the_rows():
    found = typed(GUIDES / "objectives.md")
    head, trunk, x, price = found["arguments"]
    for index, name in enumerate(("head", "trunk")):
        rows = [torch.func.grad(found["layered"], index)(head, trunk, *one) for one in zip(x, price, strict=True)]
        expected = torch.stack([sum(g.double().square().sum() for g in row.values()) for row in rows])
        # A residual, as a difference, is rounded to the size of its terms: so are the gradients of small ones.
        check_within(found[f"squares_of_{name}"], expected, 64 * eps(torch.float32) * expected.max())


def test_sharp_losses_have_the_gradients_of_the_shifted_point(shown):
    params, batch = shown["params"], [shown[name] for name in ("x", "kind", "price")]
    losses = shown["losses"]
    leaves = [p.clone().requires_grad_() for p in optree.tree_leaves(params)]
    tree = optree.tree_unflatten(optree.tree_structure(params), leaves)
    slopes = torch.autograd.grad(sum(losses(tree, *batch).values()), leaves)
    length = torch.cat([g.flatten() for g in slopes]).norm()
    moved = [(p + 0.05 * g / length).detach().requires_grad_() for p, g in zip(leaves, slopes, strict=True)]
    values = losses(optree.tree_unflatten(optree.tree_structure(params), moved), *batch)
    found = optree.tree_leaves(jd.jacobian_fn(shown["sharp"])(params, *batch)[0])
    for row, value in enumerate(optree.tree_leaves(values)):
        own = torch.autograd.grad(value, moved, retain_graph=True, materialize_grads=True)
        for x, y in zip(found, own, strict=True):
            check_within(x[row], y, 2**10 * eps(torch.float32) * y.abs().max())


def test_lbfgs_on_weighed_losses_lowers_both(shown):
    again = dict(shown)  # the page goes on from other parameters
    (block,) = [block for block in blocks(GUIDES / "recipes.md") if "LBFGS(" in block]
    exec(block, again)
    batch = [shown[name] for name in ("x", "kind", "price")]
    before, after = (again["losses"](again[name], *batch) for name in ("params", "moving"))
    assert all(after[name] < before[name] for name in before)
    assert list(before) == ["price", "kind"]  # not in the order of the weights
    in_order = dict(shown) | {"losses": lambda *args: dict(sorted(shown["losses"](*args).items()))}
    exec(block, in_order)
    assert all(map(torch.equal, optree.tree_leaves(in_order["moving"]), optree.tree_leaves(again["moving"])))
