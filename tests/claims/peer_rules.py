"""The rules of TorchJD, with defaults, or where they have none, with the values of its tests; and what they do."""

from collections.abc import Callable

import torch
from rule_table import RULES
from torch import Tensor
from torchjd import Stateful, scalarization
from torchjd import aggregation as peer
from torchjd.linalg import QuadprogProjector

import functional_jd as jd

Rule = Callable[[Tensor], Tensor]
_DEFAULTS = "AlignedMTL ConFIG DualProj ExcessMTL GradDrop GradVac IMTLG MGDA Mean PCD PCGrad Random Sum UPGrad"
_OTHERS: dict[str, Callable[[int], Rule]] = {
    "CAGrad(0.5)": lambda m: peer.CAGrad(0.5),
    "Constant(1, 2, ...)": lambda m: peer.Constant(torch.arange(1.0, m + 1)),
    "FairGrad(1)": lambda m: peer.FairGrad(1.0),
    "Krum(1)": lambda m: peer.Krum(1),
    "NashMTL(m)": lambda m: peer.NashMTL(m),
    "TrimmedMean(1)": lambda m: peer.TrimmedMean(1),
}
_PEERS = {name: getattr(peer, name) for name in _DEFAULTS.split()}
_MADE = {f"{name}()": lambda m, rule=rule: rule() for name, rule in _PEERS.items()} | _OTHERS
AGGREGATORS = {name: _MADE[name] for name in sorted(_MADE, key=str.lower)}
"""By what a rule is called with; a fresh one for each question. Rules for at least four rows are asked with four."""
WEIGHTINGS = ("CRMOGMWeighting", "MoDoWeighting", "SDMGradWeighting")  # without an aggregator of their own
SCALARIZERS = [name for name in scalarization.__all__ if name != "Scalarizer"]
# Scalarizers whose idea is no rule above.
ONLY_SCALARIZERS = ("COSMOS", "DWA", "FAMO", "GeometricMean", "IMTLL", "PBI", "STCH", "UW")
STEP, CLOSE = 1e-6, 1e-4


def jacobian(m: int = 4, n: int = 6, seed: int = 0) -> Tensor:
    """Rows in general position, of length about one."""
    return torch.randn(m, n, generator=torch.Generator().manual_seed(seed)) / n**0.5


def reason(error: BaseException) -> str:
    """Type and first line of an error."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:90]}"


def outcome(attempt: Callable[..., object], *args: object) -> str:
    """What an attempt ends in."""
    try:
        attempt(*args)
    except Exception as error:
        return reason(error)
    return "works"


def counted(said: dict[str, str], word: str) -> str:
    """How many rules end in this, and their names."""
    names = [name for name, text in said.items() if text.startswith(word)]
    return f"{len(names)} of {len(said)}: {', '.join(names)}"


def count() -> dict[str, str]:
    """How many rules there are, ours counted like the peer's: ideas, not wrappers around rules."""
    rows = len(AGGREGATORS) + len(WEIGHTINGS)
    return {
        "functional_jd": f"{len(RULES)} entries of tests/rule_table.py",
        "TorchJD, rules of rows": f"{len(AGGREGATORS)} aggregators and {len(WEIGHTINGS)} weightings: {rows}",
        "TorchJD, scalarizers": str(len(SCALARIZERS)),
        "TorchJD, counted like ours": f"{rows + len(ONLY_SCALARIZERS)}: with {', '.join(ONLY_SCALARIZERS)}",
    }


def transforms() -> dict[str, str]:
    """Rules under `torch.vmap` and `torch.compile(fullgraph=True)`, made outside of what is transformed; one call."""
    several = torch.stack([jacobian(seed=seed) for seed in range(3)])

    def vmapped(make: Callable[[int], Rule]) -> None:
        torch.vmap(make(4), randomness="different")(several)

    def compiled(make: Callable[[int], Rule]) -> None:
        torch._dynamo.reset()
        torch.compile(make(4), fullgraph=True, backend="eager")(jacobian())

    batched = {name: outcome(vmapped, make) for name, make in AGGREGATORS.items()}
    in_one_graph = {name: outcome(compiled, make) for name, make in AGGREGATORS.items()}
    both = {name: said if batched[name] == "works" else batched[name] for name, said in in_one_graph.items()}
    return {
        "TorchJD aggregators under vmap": counted(batched, "works"),
        "TorchJD aggregators compiled": counted(in_one_graph, "works"),
        "both": counted(both, "works"),
        "not asked": f"{', '.join(WEIGHTINGS)}: they take more than a matrix",
    }


def overflow() -> dict[str, str]:
    """What comes of a row with an infinite entry: an error, a non-finite direction, or a finite one."""
    J, said = jacobian(), {}
    J[1, 2] = float("inf")
    for name, make in AGGREGATORS.items():
        torch.manual_seed(0)
        try:
            said[name] = "hides it" if make(4)(J.clone()).isfinite().all() else "shows it"
        except Exception as error:
            said[name] = f"raises ({reason(error)})"
    found = {f"TorchJD {word}": counted(said, word) for word in ("raises", "hides it", "shows it")}
    return found | {"of these": "TrimmedMean is made to leave extremes out: hiding one is its purpose"}


def resume() -> dict[str, str]:
    """A stateful rule that is saved and loaded, into a fresh rule or one whose buffers have shapes: does it go on?"""

    def resumed(make: Callable[[int], Rule], called: bool) -> None:
        first, second = make(4), make(4)
        for seed in range(3):
            first(jacobian(seed=seed))
        if called:
            second(jacobian())
        second.load_state_dict(first.state_dict())
        torch.manual_seed(0)
        expected = first(jacobian(seed=9))
        torch.manual_seed(0)
        if not torch.equal(second(jacobian(seed=9)), expected):
            raise ValueError("loads, and goes on otherwise")

    stateful = {name: make for name, make in AGGREGATORS.items() if isinstance(make(4), Stateful)}
    return {
        f"TorchJD {name}, {into}": outcome(resumed, make, called)
        for into, called in (("into a fresh rule", False), ("called once", True))
        for name, make in stateful.items()
    }


def unit_distance(one: Tensor, other: Tensor) -> float:
    """The distance of two directions of length one."""
    return float((one / one.norm() - other / other.norm()).norm())


def short_gradients() -> dict[str, str]:
    """What `UPGrad` makes of short gradients, two conflicting rows in float32: with defaults, and with `norm_eps=0`."""
    J = torch.tensor([[-4.0, 1.0, 1.0], [6.0, 1.0, 1.0]]) / 6
    upgrad, mean = peer.UPGrad(), peer.Mean()(J)
    cured = peer.UPGrad(projector=QuadprogProjector(norm_eps=0.0))
    ours = lambda J: jd.aggregate(jd.upgrad(), J).direction
    found = {"UPGrad() from Mean(), norm 1": f"{unit_distance(upgrad(J), mean):.3f}"}
    for scale in (1e-1, 1e-2, 5e-3, 1e-3, 1e-6):
        texts = [f"from itself at norm 1 {unit_distance(upgrad(scale * J), upgrad(J)):.3f}"]
        texts.append(f"from Mean() {unit_distance(upgrad(scale * J), mean):.3f}")
        texts.append(f"norm_eps=0: from itself {unit_distance(cured(scale * J), cured(J)):.3f}")
        texts.append(f"ours: from itself {unit_distance(ours(scale * J), ours(J)):.3f}")
        found[f"norm {scale:g}"] = "; ".join(texts)
    return found


OURS = {"aligned_mtl()": jd.aligned_mtl(), "mgda()": jd.mgda(), "trimmed_mean(1)": jd.trimmed_mean(1)}


def derivative(name: str, J: Tensor) -> str:
    """`none`, with the error; or how far it is from central differences along one direction."""
    g = torch.Generator().manual_seed(1)
    way = torch.randn(J.shape, generator=g, dtype=J.dtype)
    target = torch.randn(J.shape[1], generator=g, dtype=J.dtype)

    def value(J: Tensor) -> Tensor:
        torch.manual_seed(0)
        J = J.clone()
        return (jd.aggregate(OURS[name], J).direction if name in OURS else AGGREGATORS[name](4)(J)) @ target

    wanted = J.clone().requires_grad_()
    try:
        (found,) = torch.autograd.grad(value(wanted), wanted)
    except Exception as error:
        return f"none ({reason(error)})"
    expected = (value(J + STEP * way) - value(J - STEP * way)) / (2 * STEP)
    off = float(((found * way).sum() - expected).abs() / expected.abs().clamp(min=1e-3))
    return "right" if off < CLOSE else f"off by {off:.2g}"


def derivatives() -> dict[str, str]:
    """Derivatives beside central differences in float64: of rows in general position; equal, zero or opposite."""
    torch.set_default_dtype(torch.float64)
    try:
        J = jacobian()
        degenerate = {
            "two equal rows": J[[0, 0, 1, 2]],
            "a row of zeros": torch.cat([J[:3], torch.zeros(1, J.shape[1])]),
            "two opposite rows": torch.stack([J[0], -J[0], J[1], J[2]]),
        }
        general = {name: derivative(name, J) for name in AGGREGATORS}
        found = {f"TorchJD, general position: {word}": counted(general, word) for word in ("none", "right", "off")}
        asked = [name for name in AGGREGATORS if not general[name].startswith("none")]
        for case, J in degenerate.items():
            for who, names in (("TorchJD", asked), ("functional_jd", OURS)):
                wrong = [f"{name} {said}" for name in names if (said := derivative(name, J)) != "right"]
                found[f"{who}, {case}: not right"] = ", ".join(wrong) or "none"
    finally:
        torch.set_default_dtype(torch.float32)
    return found
