"""How the pages of the study are written: tables in Markdown, methods by their names, differences in hundredths."""

from collections.abc import Iterable
from pathlib import Path

from problems import PROBLEMS
from study_cells import Cell
from study_rules import KEYED, SPELLED
from study_statistics import REFERENCE, Difference

Cells = dict[str, dict[str, Cell]]
BASELINES = (REFERENCE, "start", "unit_sum", "random_search", "tpe", "grid")
WORDS = ("better", "none seen", "worse")


def table(titles: list[str], rows: list[list[str]]) -> list[str]:
    """The lines of a table in Markdown."""
    lines = ["| " + " | ".join(titles) + " |", "| --- |" + " --- |" * (len(titles) - 1)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


def write_between(page: Path, begin: str, end: str, lines: Iterable[str]) -> None:
    """Put lines between the marks of a page."""
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    if not found:
        raise ValueError(f"write_between: expected the mark {begin!r}, found none in {page.name}. Put it back.")
    page.write_text("\n".join([before + begin, "", *lines, "", end]) + rest.partition(end)[2], encoding="utf-8")


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
