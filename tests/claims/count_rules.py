"""How many rules there are, ours counted like the peer's: ideas, not wrappers around rules."""

from peer_rules import AGGREGATORS, ONLY_SCALARIZERS, SCALARIZERS, WEIGHTINGS
from rule_table import RULES


def measure() -> dict[str, str]:
    """The figures of the row `rules`."""
    rows = len(AGGREGATORS) + len(WEIGHTINGS)
    return {
        "functional_jd": f"{len(RULES)} entries of tests/rule_table.py",
        "TorchJD, rules of rows": f"{len(AGGREGATORS)} aggregators and {len(WEIGHTINGS)} weightings: {rows}",
        "TorchJD, scalarizers": str(len(SCALARIZERS)),
        "TorchJD, counted like ours": f"{rows + len(ONLY_SCALARIZERS)}: with {', '.join(ONLY_SCALARIZERS)}",
    }
