"""How the page of the study is written: tables in Markdown, methods by their names, differences in hundredths."""

from problems import PROBLEMS
from study_cells import Cell
from study_rules import SPELLED
from study_statistics import REFERENCE, Difference

Cells = dict[str, dict[str, Cell]]
KEYED = ("pcgrad", "gradvac", "graddrop", "random_weights")
BASELINES = (REFERENCE, "start", "unit_sum", "random_search", "tpe", "grid")


def table(titles: list[str], rows: list[list[str]]) -> list[str]:
    """The lines of a table in Markdown."""
    lines = ["| " + " | ".join(titles) + " |", "| --- |" + " --- |" * (len(titles) - 1)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


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


def points(found: Difference) -> str:
    """A difference in hundredths, with its interval; bold where the interval leaves out 0."""
    text = f"{signed(found.mean)} [{signed(found.low)}, {signed(found.high)}]"
    return text if found.word == "none seen" else f"**{text}**"


def reference_of(problem: str) -> str:
    """What methods are compared with: where weights are all equal, the plain mean."""
    return "mean" if PROBLEMS[problem].exchangeable else REFERENCE


def named(problem: str) -> str:
    """A problem on the page; marked where its score is one minus the loss that the reference minimises."""
    return f"{problem} (=)" if PROBLEMS[problem].own_loss else problem
