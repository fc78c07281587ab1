"""Every engine against a loop of plain autograd: kinds of losses x engines x scales, and the steps of rules with them.

Rows of models are a few hundred roundings of their length off, so bounds are that many epsilons times the sum of the
lengths that are added up.
"""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from bounds import check_products, check_stable, check_within, eps
from gramian_by_hand import WEIGHTS, priced
from jacobian_by_hand import KINDS, leaves, rows_of
from torch.utils import _pytree
from zoo import MODELS, MORE, Case, numbers

import functional_jd as fj
from functional_jd import gramian_fn, jacobian_fn, per_example, scale_state, squared_norms_fn, weighted_fn
from functional_jd.core.heads import MultitaskJacobian
from functional_jd.distributed import replicated
from functional_jd.engines import replicas
from functional_jd.engines.by_name import MODES
from functional_jd.engines.kinds import kind as from_rows
from functional_jd.objectives import Multitask

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")

ROUNDINGS = 2**10
FACTORS = torch.tensor([0.5, 1024.0, 3.0, 2.0**-20])
POWERS = FACTORS.log2().floor().exp2()


def by_sets(model):
    """The losses by name, one of the first example, the other of all others: m = 4."""
    error = lambda p, x, y: ((model.predict(p, x[None])[0] - y) ** 2).mean()
    size = lambda p, x: model.predict(p, x[None])[0].square().sum()
    x, losses = model.inputs, per_example({"size": size, "error": error})
    return Case(model.params, losses, ({"error": x[:1], "size": x[1:]}, {"error": numbers(1, 3, seed=99)}))


def apart(case):
    """The losses as a function that autograd differentiates one by one."""
    named = getattr(case.losses, "loss", None)
    if not isinstance(named, dict):
        return case.losses
    return lambda p, x, y: [named["error"](p, x["error"][0], y["error"][0]), *(named["size"](p, e) for e in x["size"])]


ALL = MODELS | MORE
MAKE = KINDS | {"by_sets": by_sets}
# What scales do, and sets of examples, is not the models' business: some that are recorded, one that vmap refuses.
FEW = ["mlp", "tied", "encoder", "batch_norm_eval", "scalars", "masked"]


has = lambda name, kind: name in FEW if kind == "by_sets" else ALL[name]().single or kind != "by_example"


CASES = [(name, kind) for name in ALL for kind in MAKE if has(name, kind)]


class Expected:
    """Rows, values and what follows from them, by plain autograd; the heads' leaves come first, as names are sorted."""

    def __init__(self, case):
        self.case, self.rows = case, rows_of(apart(case), case.params, *case.args)
        self.heads = len(leaves(case.params["heads"])) if isinstance(case.losses, Multitask) else 0
        self.m = len(self.rows[0])
        self.values = at(case.losses, case)
        flat = [r.double().reshape(self.m, -1) for r in self.rows]
        self.matrix = torch.cat(flat[self.heads :], 1)
        self.dtype = max((x.dtype for x in leaves(case.params)), key=eps)
        # What an entry of each row may be off by.
        self.off = ROUNDINGS * eps(self.dtype) * torch.cat(flat, 1).norm(dim=1)

    def check_jacobian(self, jacobian, scale):
        """The rows, unscaled in at least float32; the heads' as a plain sum."""
        dtype = lambda rows: rows.dtype if scale is None else torch.promote_types(rows.dtype, torch.float32)
        # Rows are multiplied by their scale, and then by its reciprocal in float32.
        factors = torch.ones(self.m) if scale is None else factors_of(scale).double().expand(self.m)
        left = factors * factors.reciprocal().float()
        shared = self.rows[self.heads :]
        found = leaves(jacobian)
        for leaf, rows in zip(found[: len(shared)], shared, strict=True):
            assert (leaf.shape, leaf.dtype) == (rows.shape, dtype(rows))
            each = [-1, *[1] * (rows.ndim - 1)]
            check_within(leaf, rows.double() * left.reshape(each), self.off.reshape(each))
        for leaf, rows in zip(found[len(shared) :], self.rows[: self.heads], strict=True):
            assert (leaf.shape, leaf.dtype) == (rows.shape[1:], dtype(rows))
            check_within(leaf, rows.double().sum(0), self.off.sum())

    def check_direction(self, direction):
        weights = WEIGHTS[: self.m]
        found = leaves(direction)
        assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in leaves(self.case.params)]
        for i, (leaf, rows) in enumerate(zip(found, self.rows, strict=True)):
            own = torch.ones_like(weights) if i < self.heads else weights
            check_within(leaf, torch.tensordot(own, rows.double(), 1), own.abs() @ self.off)

    def check_pulled(self, values, pullback, scale, **how):
        self.check_values(values)
        direction, finite = pullback(WEIGHTS[: self.m], **how)
        self.check_direction(direction)
        assert finite.shape == (() if scale is None else factors_of(scale).shape)
        assert finite.all()

    def check_values(self, values):
        assert _pytree.tree_structure(values) == _pytree.tree_structure(self.values)
        for x, y in zip(leaves(values), leaves(self.values), strict=True):
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
            check_within(x, y, ROUNDINGS * eps() * y.abs())


@cache
def expected_of(name, kind):
    return Expected(MAKE[kind](ALL[name]()))


def at(f, case):
    """Always from the same seed: where losses draw numbers, every engine draws the same."""
    torch.manual_seed(0)
    return f(case.params, *case.args)


def scales_of(expected, name, how):
    """None, one, one per objective; as values too, of one model. Few models are enough to tell the modes apart."""
    scales = {"none": None}
    if name in FEW or how in ("jacobian auto", "gramian", "weighted"):
        # Rows are multiplied with the reciprocal of their scale in float32, which is exact for powers of two.
        scales["by row"] = (POWERS if how.startswith("jacobian") else FACTORS)[: expected.m]
    if name in FEW:
        scales["one"] = torch.tensor(64.0)
    if name == "mlp":
        scales |= {"a state": scale_state(8.0), "states": scale_state(2.0**16, shape=(expected.m,))}
    return scales


def factors_of(scale):
    return None if scale is None else getattr(scale, "scale", scale)


def check_rows(expected, mode, scale):
    case = expected.case
    jacobian, values, *finite = at(jacobian_fn(case.losses, mode=mode, scale=scale), case)
    expected.check_jacobian(jacobian, scale)
    assert all(flags.all() and flags.shape == factors_of(scale).shape for flags in finite)
    assert len(finite) == (scale is not None)
    expected.check_values(values)
    rows = case.params["shared"] if isinstance(case.losses, Multitask) else case.params
    assert isinstance(jacobian, MultitaskJacobian) == isinstance(case.losses, Multitask)
    shared = jacobian.shared if isinstance(jacobian, MultitaskJacobian) else jacobian
    assert _pytree.tree_structure(shared) == _pytree.tree_structure(rows)
    if isinstance(jacobian, MultitaskJacobian):
        assert _pytree.tree_structure(jacobian.heads) == _pytree.tree_structure(case.params["heads"])


def check_gramian(expected, scale):
    gramian, *rest = at(gramian_fn(expected.case.losses, scale=scale), expected.case)
    assert gramian.dtype == torch.float64
    check_products(gramian, expected.matrix, expected.matrix, expected.dtype)
    expected.check_pulled(*rest, scale)


def check_norms(expected, scale):
    squares, *rest = at(squared_norms_fn(expected.case.losses, scale=scale), expected.case)
    assert squares.dtype == torch.float64
    true = expected.matrix.square().sum(1)
    check_within(squares, true, ROUNDINGS * eps(expected.dtype) * true)
    expected.check_pulled(*rest, scale)


def check_weighted(expected, scale):
    expected.check_pulled(*at(weighted_fn(expected.case.losses, scale=scale), expected.case), scale, last=True)


def possible(model, kind, mode):
    return mode != "vmap" or (model.examples if kind in ("by_example", "by_sets") else model.vmap)


def engines_of(expected, name, kind):
    """Names of engines, and their check at one scale."""
    model = ALL[name]()
    modes = [mode for mode in MODES if possible(model, kind, mode)] if name in MODELS else ["auto"]
    found = {f"jacobian {mode}": lambda scale, mode=mode: check_rows(expected, mode, scale) for mode in modes}
    checks = {"gramian": check_gramian, "norms": check_norms, "weighted": check_weighted}
    return found | {each: lambda scale, check=check: check(expected, scale) for each, check in checks.items()}


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_every_engine_equals_a_loop_of_plain_autograd(name, kind, monkeypatch):
    expected, failures, formed = expected_of(name, kind), [], []
    by_rows = from_rows.products_and_pullback
    noted = lambda *given, **how: formed.append(1) or by_rows(*given, **how)
    monkeypatch.setattr(from_rows, "products_and_pullback", noted)
    for how, check in engines_of(expected, name, kind).items():
        for scaled, scale in scales_of(expected, name, how).items():
            for lean in (True, False) if how in ("gramian", "norms") and scale is None else (True,):
                priced(monkeypatch, lean)
                try:
                    check(scale)
                except AssertionError as error:
                    failures.append(f"{how}, scale {scaled}, {'factors' if lean else 'rows'}: {error}")
    assert not failures, "\n".join(failures)
    # The recorder takes the embedding without its sparse gradient, which vmap refuses.
    refused = kind in ("by_example", "by_sets") and not ALL[name]().examples and name != "sparse_embedding"
    assert bool(formed) == refused, "all rows where vmap refuses the examples, and only there"
    for mode in (mode for mode in MODES if name in MODELS and not possible(MODELS[name](), kind, mode)):
        with pytest.raises((RuntimeError, NotImplementedError)):
            at(jacobian_fn(expected.case.losses, mode=mode), expected.case)


RULES = {
    "nothing": fj.mean(),
    "losses": fj.stch(),
    "norms": fj.clipped(1.0),
    "gramian": fj.upgrad(),
    "gramian and losses": fj.natural_gradient(1e-3),
    "rows": fj.trimmed_mean(1),
    "rows and losses": fj.db_mtl(),
    "nothing by group": fj.grouped({"layer0": fj.mean(), "layer1": fj.mean()}),
    "nothing by groups that differ": fj.grouped({"layer0": fj.total(), "layer1": fj.mean()}),
    "losses by group": fj.grouped({"layer0": fj.stch(), "layer1": fj.mean()}),
    "gramian by group": fj.grouped({"layer0": fj.upgrad(), "layer1": fj.mean()}),
}
WITHOUT_ROWS = [need for need in RULES if need.startswith(("nothing", "losses"))]
MODES_APART = {f"jacobian {mode}": fj.engines.jacobian_engine(mode) for mode in MODES if mode != "auto"} | {
    "jacobian chunks": fj.engines.jacobian_engine(chunk_size=2)
}
ENGINES = MODES_APART | {
    "jacobian": fj.engines.jacobian_engine(),
    "gramian": fj.engines.gramian_engine(),
    "weighted": fj.engines.weighted_engine(),
    "features": fj.engines.features_engine(),
    "auto": "auto",
    "replicated": replicated(),
    "replicated jacobian": replicated("jacobian"),
    "replicated weighted": replicated("weighted"),
}


@pytest.fixture(scope="module")
def _alone(tmp_path_factory):
    """The only rank of a group."""
    store = (tmp_path_factory.mktemp("group") / "store").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def serves(how, need, kind):
    if how == "features":
        return need in ("gramian", "gramian and losses") and kind == "tasks"
    if how == "gramian":
        return need in ("norms", "gramian", "gramian and losses", "gramian by group")
    if how.startswith("replicated") and kind == "by_sets":
        return False
    return need in WITHOUT_ROWS if how.endswith("weighted") else True


def arranged(tree, rows):
    """The rows, in the structure of the parameters."""
    return {key: arranged(tree[key], rows) for key in sorted(tree)} if isinstance(tree, dict) else next(rows)


def after_step(expected, rule, how):
    """`f(rows, values)`: the losses, the weights and the parameters after a step of length one, heads first."""
    case, params = expected.case, leaves(expected.case.params)

    def weigh(shared, values):
        if how != "features":
            return fj.aggregate(rule, shared, losses=values)
        h = case.losses.features(case.params["shared"], *case.args)
        by_feature = rows_of(lambda h: case.losses.heads(case.params["heads"], h, *case.args), h)
        return fj.aggregate(rule, by_feature, losses=values)

    def f(rows, values):
        own, trunk = rows[: expected.heads], case.params["shared"] if expected.heads else case.params
        shared = arranged(trunk, iter(rows[expected.heads :]))
        weights = weigh(shared, values).weights
        directions = [r.sum(0) for r in own] + leaves(fj.aggregation.combine(shared, weights))
        return values, leaves(weights), [p - d for p, d in zip(params, directions, strict=True)]

    return f


@pytest.mark.usefixtures("_alone")
@pytest.mark.filterwarnings("ignore:train_state. .* residuals")  # any losses will do
@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("need", RULES)
def test_a_step_with_every_engine_is_the_one_by_hand(need, kind):
    expected, rule, failures = expected_of("mlp", kind), RULES[need], []
    case, values = expected.case, torch.cat([x.reshape(-1) for x in leaves(expected.values)])
    by_row = scale_state(shape=(expected.m,))._replace(scale=POWERS[: expected.m])
    how_to = {"losses": case.losses, "aggregator": rule, "optimizer": fj.sgd(1.0)}
    for how, engine_of in ENGINES.items():
        if not serves(how, need, kind):
            with pytest.raises(ValueError, match=r"serves|of one kind|must be made by"):
                fj.train_state(case.params, *case.args, engine=engine_of, **how_to)
            continue
        # Modes differ in which factor a row gets; whatever follows the rows is the same for all of them.
        others = {} if how in MODES_APART else {"none": None, "one": scale_state(8.0)}
        for scaled, scale in {"by row": by_row, **others}.items():
            state = fj.train_state(case.params, *case.args, scale=scale, engine=engine_of, **how_to)
            state, info = fj.step(state, *case.args, engine=engine_of, **how_to)
            losses = torch.cat([x.reshape(-1) for x in leaves(info.losses)])
            found = losses, leaves(info.weights), leaves(state.params)
            try:
                check_stable(found, after_step(expected, rule, how), expected.rows, values, roundings=ROUNDINGS)
                assert info.finite.shape == (() if scale is None else scale.scale.shape)
                assert info.finite.all()
                assert info.moved
                if need in ("gramian", "gramian and losses") and how != "features":
                    check_products(info.gramian, expected.matrix, expected.matrix)
            except AssertionError as error:
                failures.append(f"{how}, scale {scaled}: {error}")
    assert not failures, "\n".join(failures)


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("name", [None, "weighted", "jacobian"])
def test_replicas_form_rows_only_where_a_rule_needs_them_or_by_name(name, monkeypatch):
    formed, rows_of_plan = [], replicas.rows_of_plan
    monkeypatch.setattr(replicas, "rows_of_plan", lambda *given: formed.append(1) or rows_of_plan(*given))
    case, engine = expected_of("mlp", "plain").case, replicated(*filter(None, [name]))
    for need in WITHOUT_ROWS:
        how = {"losses": case.losses, "aggregator": RULES[need], "optimizer": fj.sgd(1.0), "engine": engine}
        fj.step(fj.train_state(case.params, *case.args, **how), *case.args, **how)
        assert bool(formed) == (name == "jacobian")
        formed.clear()
