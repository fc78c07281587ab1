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
COMPILED = """
    cells wavenet graph sets grouped tied fourier renormed autoencoder hyper experts old_norms energy adapted bilinear
    lora
"""

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),  # vmap of ops without a rule
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning"),  # packed sequences
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # peft asks for it
    pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:train_state. no loss reaches:UserWarning"),  # parameters without a use
    # torch.compile hides this by `showwarning`, too late for warnings that are errors: weights that old norms leave.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@cache
def reference(family):
    return Reference(FAMILIES[family]())


def unless_torch_refuses(run):
    try:
        run()
    except RefusedError as error:
        pytest.skip(str(error))
    except (NotImplementedError, RuntimeError) as error:
        if any(words in str(error) for words in REFUSED_BY_TORCH):
            pytest.skip(f"torch: {str(error).splitlines()[0][:120]}")
        raise


CHECKS = {
    "rows in a loop": lambda made: made.check_rows("loop"),
    "rows by vmap": lambda made: made.check_rows("vmap"),
    "gramian and pullback": lambda made: made.check_gramian(),
    "gramian and pullback, differentiable": lambda made: made.check_gramian(differentiable=True),
    "weighted sum of rows": lambda made: made.check_weighted(),
    "rows of examples": lambda made: made.check_example_rows("auto"),
    "rows of examples in a loop": lambda made: made.check_example_rows("loop"),
    "sums of examples": lambda made: made.check_example_sums(),
    "sums of examples, differentiable": lambda made: made.check_example_sums(differentiable=True),
    "heads of several tasks": lambda made: made.check_multitask(),
    "bfloat16 as close as native autocast": lambda made: made.check_autocast(),
    "steps": lambda made: made.check_steps(),
}
IN_A_GRAPH = {
    "compiled steps": lambda made: made.check_steps(compiled=True),
    "compiled gramian": lambda made: made.check_compiled_gramian(),
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_family(family, check):
    unless_torch_refuses(lambda: CHECKS[check](reference(family)))


@pytest.mark.parametrize("check", IN_A_GRAPH)
@pytest.mark.parametrize("family", COMPILED.split())
def test_family_in_a_graph(family, check):
    unless_torch_refuses(lambda: IN_A_GRAPH[check](reference(family)))
