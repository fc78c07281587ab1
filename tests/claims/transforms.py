"""Rules under `torch.vmap` and `torch.compile(fullgraph=True)`, made outside of what is transformed; one call."""

import torch
from norm_layers import outcome
from peer_rules import AGGREGATORS, WEIGHTINGS, jacobian


def _batched(name: str) -> None:
    rule = AGGREGATORS[name](4)
    torch.vmap(rule, randomness="different")(torch.stack([jacobian(seed=seed) for seed in range(3)]))


def _compiled(name: str) -> None:
    torch._dynamo.reset()
    rule = AGGREGATORS[name](4)
    torch.compile(rule, fullgraph=True, backend="eager")(jacobian())


def measure() -> dict[str, str]:
    """The figures of the row `rules under vmap and compile(fullgraph=True)`."""
    batched = {name: outcome(lambda name=name: _batched(name)) for name in AGGREGATORS}
    compiled = {name: outcome(lambda name=name: _compiled(name)) for name in AGGREGATORS}
    works = lambda found: [name for name, said in found.items() if said == "works"]
    both = [name for name in works(batched) if name in works(compiled)]
    return {
        "TorchJD aggregators under vmap": f"{len(works(batched))} of {len(AGGREGATORS)}: {', '.join(works(batched))}",
        "TorchJD aggregators compiled": f"{len(works(compiled))} of {len(AGGREGATORS)}: {', '.join(works(compiled))}",
        "both": f"{len(both)}: {', '.join(both)}",
        "not asked": f"{', '.join(WEIGHTINGS)}: they take more than a matrix",
    }
