"""Sharded parameters: several processes on loopback, each with its shards, do what one does with whole tensors."""

from pathlib import Path

import pytest
from launches import THOROUGH, assert_passed, checks_in, reports_of

HERE = Path(__file__).parent
WORKER = HERE / "shards.py"
FILES = ("dtypes", "steps", "functions", "trainers", "disagreements", "layers", "checkpoints")
CHECKS = checks_in(*(HERE / f"shard_{file}.py" for file in FILES))
PATIENCE = 3000 if THOROUGH else 900
ONLY_ON_FOUR = [
    "a_mesh_of_two_dimensions",
    "shards_in_other_places_are_refused_and_gathered",
    "checkpoints_of_another_number_of_ranks_go_on_with_the_same_losses",
]
"""What needs a second dimension of the mesh, or what two ranks wrote."""
ONLY_ON_TWO = ["checkpoints_are_saved_and_loaded_by_torch"]
ON = {
    2: [check for check in CHECKS if check not in ONLY_ON_FOUR],
    4: [check for check in CHECKS if check not in ONLY_ON_TWO]
    if THOROUGH
    else [
        "float32_steps_of_sgd_equal_those_of_whole_parameters",
        "the_functions_of_a_step_by_hand",
        "gathering_composes_with_transforms",
        "multitask_losses_are_gathered_part_by_part",
        *ONLY_ON_FOUR,
    ],
}
"""Four ranks show empty shards, too."""


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What each rank says of each check, by number of ranks: one launch for all, unless one fails."""
    seen = {}

    def of(ranks):
        if ranks > 2:
            of(2)  # its checkpoint is what the others load
        if ranks not in seen:
            folder = tmp_path_factory.mktemp(f"shards{ranks}")
            seen[ranks] = reports_of(WORKER, ranks, folder, ON[ranks], PATIENCE)
        return seen[ranks]

    return of


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "check"), [(ranks, check) for ranks in ON for check in ON[ranks]])
def test_on_ranks(reports, ranks, check):
    assert_passed(reports(ranks), check)
