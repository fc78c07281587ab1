"""A stateful rule that is saved and loaded: does it go on as if it had not been?"""

import torch
from norm_layers import outcome
from peer_rules import AGGREGATORS, jacobian
from torchjd import Stateful


def _resumed(name: str, called: bool = False) -> None:
    """With `called`, the rule that is loaded into has been called once, so that its buffers have shapes."""
    first = AGGREGATORS[name](4)
    for seed in range(3):
        first(jacobian(seed=seed))
    second = AGGREGATORS[name](4)
    if called:
        second(jacobian())
    second.load_state_dict(first.state_dict())
    torch.manual_seed(0)
    expected = first(jacobian(seed=9))
    torch.manual_seed(0)
    if not torch.equal(second(jacobian(seed=9)), expected):
        raise ValueError("loads, and goes on otherwise")


def measure() -> dict[str, str]:
    """The figures of the row `resume a stateful rule`."""
    names = [name for name in AGGREGATORS if isinstance(AGGREGATORS[name](4), Stateful)]
    fresh = {f"TorchJD {name}, into a fresh rule": outcome(lambda name=name: _resumed(name)) for name in names}
    cured = {f"TorchJD {name}, called once": outcome(lambda name=name: _resumed(name, True)) for name in names}
    return fresh | cured
