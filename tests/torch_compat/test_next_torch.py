"""The next torch: each private name is taken away in a process, which takes a plain step and uses what needs it."""

import ast
import gc
import inspect
import json
import multiprocessing
import os
import re
import subprocess
import sys
import warnings
from contextlib import contextmanager, nullcontext
from ctypes import py_object, pythonapi
from dataclasses import dataclass
from functools import partial, reduce
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

# What a plain step cannot do without. At most five.
BREAK_A_STEP = {"_C._functorch.get_interpreter_stack", "autograd.forward_ad._current_level"}


# Features, each with numbers that are the same without the name where something else takes its place.


def step(losses=lambda p: torch.stack([(p["w"] @ p["w"].T).square().sum(), p["b"].exp().sum()]), params=None, **engine):
    import functional_jd as fj

    params = params or {"w": torch.arange(6.0).reshape(2, 3) / 10, "b": torch.ones(2)}
    how = {"losses": losses, "aggregator": fj.upgrad(), "optimizer": fj.adamw(), **engine}
    state, info = fj.step(fj.train_state(params, **how), **how)
    return [x for leaf in (*state.params.values(), info.losses) for x in leaf.detach().flatten().tolist()]


def many_losses():
    return step(lambda p: (p["w"].T @ p["w"] * p["b"].sum()).tanh().flatten())


def layers(engine="gramian"):
    return step(lambda p: nn.functional.linear(torch.ones(1, 3), p["w"], p["b"]).tanh()[0], engine=engine)


def examples():
    import functional_jd as fj

    loss = lambda p, x: nn.functional.linear(x, p["w"], p["b"]).tanh().sum()
    params = {"w": torch.arange(6.0).reshape(2, 3) / 10, "b": torch.ones(2)}
    return fj.gramian_fn(fj.per_example(loss))(params, torch.arange(24.0).reshape(4, 2, 3))[0].flatten().tolist()


def draws():
    from functional_jd.random import key, uniform

    return uniform(key(0), (3,)).tolist()


def dropout():
    import functional_jd as fj

    return fj.random.keyed(lambda x: nn.functional.dropout(x, 0.5, True))(fj.random.key(0), torch.ones(8)).tolist()


def drawn_in_vmap():
    import functional_jd as fj

    f = torch.vmap(lambda x: nn.functional.dropout(x, 0.5, True), randomness="different")
    return fj.random.keyed(f)(fj.random.key(0), torch.ones(8, 2)).flatten().tolist()


def compiled():
    import functional_jd as fj

    loss = lambda p, x: nn.functional.linear(x, p["w"], p["b"]).tanh().sum(1)
    params = {"w": torch.arange(6.0).reshape(2, 3) / 10, "b": torch.ones(2)}
    gramian = torch.compile(fj.gramian_fn(loss), backend="eager", fullgraph=True)
    return gramian(params, torch.arange(12.0).reshape(4, 3))[0].flatten().tolist()


def graph():
    import functional_jd as fj

    with torch.device("cpu"):
        return fj.compiled(torch.sin, backend="eager")(torch.ones(2)).tolist()


def compiled_draws():
    from functional_jd.torch_compat.torch_internals import show_to_compiled_modes

    return show_to_compiled_modes([torch.rand_like])


def checkpointed_under_a_mode():
    import functional_jd as fj

    f = fj.random.keyed(lambda x: torch.utils.checkpoint.checkpoint(torch.tanh, x, use_reentrant=False).sum())
    return fj.jacobian_fn(lambda x: f(fj.random.key(0), x))(torch.ones(2))[0].flatten().tolist()


def module():
    import functional_jd as fj

    net = nn.Linear(3, 2)
    params = {name: x.detach().requires_grad_() for name, x in net.named_parameters()}
    return float(torch.autograd.grad(fj.functional(net)(params, {}, torch.ones(3))[0].sum(), params["bias"])[0][0])


@dataclass
class Registered:
    w: torch.Tensor


torch.export.register_dataclass(Registered)


def containers():
    import functional_jd as fj

    return fj.jacobian_fn(lambda p: 2 * p.w)(Registered(torch.ones(2)))[0].w.flatten().tolist()


FEATURES = {
    "utils._pytree.SUPPORTED_NODES": containers,
    "_functorch.predispatch._add_batch_dim": drawn_in_vmap,
    "_C._functorch._unwrap_batched": examples,
    "_functorch.eager_transforms._autograd_grad": compiled,
    "_dynamo.variables.torch.get_overridable_functions": compiled_draws,
    "overrides._get_current_function_mode_stack": graph,
    "Tensor._version": layers,
    "_C.DisableTorchFunction": draws,
    "_C._autograd._top_saved_tensors_default_hooks": checkpointed_under_a_mode,
    "utils.checkpoint._CheckpointFrame.recompute_fn": checkpointed_under_a_mode,
    "autograd.Variable._execution_engine": module,
    "overrides.has_torch_function in nn.functional.dropout": dropout,
}
"""By name, a feature that raises one sentence without it; all else works."""

REPLACED = {
    "autograd.graph._engine_run_backward": step,
    **dict.fromkeys(("_fused_adamw_", "_foreach_copy_", "_foreach_mul"), step),
    "Node._input_metadata": many_losses,
    "_C._len_torch_dispatch_stack": draws,
}
"""By name, a feature that is as good without it."""

TORCH_NEEDS = {
    "autograd.Variable._execution_engine",
    "utils.checkpoint._CheckpointFrame",
    "overrides._get_current_function_mode_stack",
    *(name for name in (*FEATURES, *REPLACED) if name.startswith("_functorch")),
}
"""Names that torch itself uses in the feature: they are back when this package was imported without them."""


@contextmanager
def without(name):
    """Take a name from torch, and give it back."""
    path, _, last = name.rpartition(".")
    if name.startswith("overrides.has"):  # the function asks by another name
        nn.functional.asks = torch.overrides.has_torch_function_unary
        exec(inspect.getsource(nn.functional.dropout).replace("has_torch_function_unary", "asks"), vars(nn.functional))
        yield
    elif last == "recompute_fn":  # of a record
        source = inspect.getsource(torch.utils.checkpoint)
        exec(re.sub(rf"\b{last}\b", "renamed", source), vars(torch.utils.checkpoint))
        yield
    else:
        owners = [reduce(getattr, path.split("."), torch) if path else torch]
        if path in ("Tensor", "Node"):  # written in C
            kinds = object.__subclasses__()
            owners = [torch._C.TensorBase] if path == "Tensor" else [kind for kind in kinds if last in vars(kind)]
        places = [gc.get_referents(vars(x))[0] if isinstance(x, type) else vars(x) for x in owners]
        taken = [place.pop(last, None) for place in places]
        _tell(owners)
        yield
        for place, value in zip(places, taken, strict=True):
            if value is not None:
                place[last] = value
        _tell(owners)


def _tell(owners):
    for owner in owners:
        if isinstance(owner, type):
            pythonapi.PyType_Modified(py_object(owner))


def _attempted(f):
    try:
        return f()
    except BaseException as error:
        while error.__cause__ is not None and "functional_jd: expected torch." not in str(error):
            error = error.__cause__
        return f"{type(error).__name__}: {error}"


def case(name, feature):
    """What a process without a name finds, for the plain step and for the feature: numbers, or an error."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", ".*torch.jit")
    with without(name) if name else nullcontext():
        if name not in TORCH_NEEDS:
            return _attempted(step), _attempted(feature)
        _attempted(partial(import_module, "functional_jd"))
    return _attempted(step), _attempted(feature)


def _cases():
    """By name, what its process found; by feature, what a process found in which torch has all names."""
    features = FEATURES | REPLACED
    cases = [(name, features.get(name, step)) for name in (*features, *BREAK_A_STEP)]

    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        answers = pool.starmap(case, cases, chunksize=1)
        whole = pool.apply(of_whole_torch)
    return dict(zip([name for name, _ in cases], answers, strict=True)) | whole


def of_whole_torch():
    """By feature, what it gives where torch has all names."""
    return {feature.__name__: case(None, feature) for feature in dict.fromkeys((FEATURES | REPLACED).values())}


@pytest.fixture(scope="module")
def found():
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _is_the_sentence(answer, name):
    found = rf"found torch {re.escape(torch.__version__)} without it"
    expected = rf"functional_jd: expected torch\.{re.escape(name)} for [\w\s.]+, {found}; install another: pip install "
    return isinstance(answer, str) and re.search(expected + r'"torch>=2\.11"\.', answer) is not None


def test_few_names_break_a_plain_step(found):
    expected = found["step"][0]
    assert not isinstance(expected, str), expected
    broken = {name for name in (*FEATURES, *REPLACED, *BREAK_A_STEP) if found[name][0] != expected}
    assert broken == BREAK_A_STEP
    assert len(broken) <= 5
    by_torch = "AttributeError: module 'torch.autograd.forward_ad' has no attribute '_current_level'"
    assert all(_is_the_sentence(answer, name) or answer == by_torch for name in broken for answer in found[name][:1])


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_says_which_name_it_needs(found, name):
    assert not isinstance(found[FEATURES[name].__name__][1], str), "the feature fails with all names too"
    assert _is_the_sentence(found[name][1], name), found[name][1]


@pytest.mark.parametrize("name", REPLACED)
def test_what_takes_the_place_of_a_name_gives_the_same_numbers(found, name):
    expected = found[REPLACED[name].__name__][1]
    assert found[name][1] == pytest.approx(expected, rel=16 * torch.finfo(torch.float32).eps)


def test_every_private_name_is_taken_away():
    extra = {"Node._input_metadata", "overrides.has_torch_function in nn.functional.dropout"}
    spaces = {"_inductor", "ops._c10d_functional"}  # whose names torch's own error tells
    tested, used = {*FEATURES, *REPLACED, *BREAK_A_STEP}, _private_names((ROOT / "functional_jd").rglob("*.py")) | extra
    assert tested ^ used == spaces | {"autograd.forward_ad", "autograd.forward_ad._current_level"}


def _private_names(files):
    """The names that these files bind or miss, outside of `torch_internals.private` itself."""
    named = set()
    for file in files:
        for call in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(call, ast.Call)
                and isinstance(call.func, ast.Name)
                and call.func.id in ("private", "Missing")
                and isinstance(call.args[0], ast.Constant)
            ):
                named.add(call.args[0].value.removesuffix(".__get__"))
    return named


if __name__ == "__main__":
    print(json.dumps(_cases()))
