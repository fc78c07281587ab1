"""How the pages of the study are written: methods by their names, differences in hundredths."""

from collections.abc import Iterable

from problems import PROBLEMS
from study_cells import Cell
from study_rules import KEYED, SPELLED
from study_statistics import REFERENCE, Difference

Cells = dict[str, dict[str, Cell]]
BASELINES = (REFERENCE, "start", "unit_sum", "random_search", "tpe", "grid")
WORDS = ("better", "none seen", "worse")


def spelled(method: str) -> str:
    """A method on the page: a rule as it is called, a baseline by its name."""
    rule = method.removesuffix("_standardised")
    if method in BASELINES:
        return f"*{method}*"
    call = SPELLED.get(rule, f"{rule}(key)" if rule in KEYED else f"{rule}()")
    return f"`{call}`" + (", standardised" if rule != method else "")


def signed(score: float) -> str:
    """A difference in hundredths, with its sign."""
    text = f"{100 * score:+.1f}"
    return "0.0" if float(text) == 0 else text


def points(found: Difference | None) -> str:
    """A difference in hundredths, with its interval; bold where the interval leaves out 0."""
    if found is None:
        return "-"
    text = f"{signed(found.mean)} [{signed(found.low)}, {signed(found.high)}]"
    return text if found.word == "none seen" else f"**{text}**"


def counted(found: Iterable[Difference], of: tuple[str, ...] = WORDS) -> str:
    """How many differences are better, not seen, and worse."""
    words = [d.word for d in found]
    return " / ".join(str(words.count(word)) for word in of)


def reference_of(problem: str) -> str:
    """What methods are compared with: where weights are all equal, the plain mean."""
    return "mean" if PROBLEMS[problem].exchangeable else REFERENCE


def named(problem: str) -> str:
    """A problem on the page; marked where its score is one minus the loss that the reference minimises."""
    return f"{problem} (=)" if PROBLEMS[problem].own_loss else problem
