"""Families of models that no other test knows, in every engine, beside an ordinary loop in float64."""

from functools import cache

import pytest
from families_computations import COMPUTATIONS
from families_language import LANGUAGE
from families_layers import LAYERS
from families_signals import SIGNALS
from families_weights import WEIGHTS
from family_checks import Reference, RefusedError

FAMILIES = {**LAYERS, **COMPUTATIONS, **WEIGHTS, **LANGUAGE, **SIGNALS}
# What torch says of models that it does not differentiate so, with or without us.
REFUSED_BY_TORCH = (
    "doesn't have storage",  # packed sequences under vmap
    "must override the setup_context",  # custom functions of old under a transform
    "from the 'SparseCPU' backend",  # gradients of sparse embeddings under vmap
)

# torch.compile takes seconds for each: one model of a kind.
COMPILED = [
    "cells",
    "wavenet",
    "graph",
    "sets",
    "grouped",
    "tied",
    "fourier",
    "renormed",
    "autoencoder",
    "hyper",
    "experts",
    "old_norms",
    "energy",
    "adapted",
    "bilinear",
]

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),  # vmap of ops without a rule
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning"),  # packed sequences
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # peft asks for it
    pytest.mark.filterwarnings("ignore:train_state. no loss reaches:UserWarning"),  # parameters without a use
    # torch.compile hides this by `showwarning`, too late for warnings that are errors: weights that old norms leave.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@cache
def reference(family):
    return Reference(FAMILIES[family]())


def check(run):
    """All that was found is within its bounds, unless torch itself refuses the model."""
    try:
        found = run()
    except RefusedError as error:
        pytest.skip(str(error))
    except (NotImplementedError, RuntimeError) as error:
        if any(words in str(error) for words in REFUSED_BY_TORCH):
            pytest.skip(f"torch: {str(error).splitlines()[0][:120]}")
        raise
    assert found
    wrong = [part for part in found if not part.error <= part.bound]
    assert not wrong, wrong


@pytest.mark.parametrize("mode", ["loop", "vmap"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows(family, mode):
    check(lambda: reference(family).check_rows(mode))


@pytest.mark.parametrize("differentiable", [False, True], ids=["eager", "differentiable"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gramian_and_pullback(family, differentiable):
    check(lambda: reference(family).check_gramian(differentiable))


@pytest.mark.parametrize("family", FAMILIES)
def test_weighted_sum_of_rows(family):
    check(reference(family).check_weighted)


@pytest.mark.parametrize("mode", ["auto", "loop"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_examples(family, mode):
    check(lambda: reference(family).check_example_rows(mode))


@pytest.mark.parametrize("differentiable", [False, True], ids=["eager", "differentiable"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gramian_and_weighted_sums_of_examples(family, differentiable):
    check(lambda: reference(family).check_example_sums(differentiable))


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_of_several_tasks(family):
    check(reference(family).check_multitask)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_close_as_native_autocast(family):
    check(reference(family).check_autocast)


@pytest.mark.parametrize("family", FAMILIES)
def test_step(family):
    check(reference(family).check_step)


@pytest.mark.parametrize("family", COMPILED)
def test_compiled_step(family):
    check(lambda: reference(family).check_step(compiled=True))


@pytest.mark.parametrize("family", COMPILED)
def test_compiled_gramian(family):
    check(reference(family).check_compiled_gramian)
