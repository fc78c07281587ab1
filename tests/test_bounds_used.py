"""Tests compare what was added up with bounds of the problem, `bounds.py`, and not with bare numbers."""

import ast
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parent
NAMES = {"atol", "rtol", "abs", "rel", "tol", "tolerance"}
COMPARING = ("close", "within", "near", "agree", "approx", "same")
SEARCHES = {"pinv", "root", "brentq", "minimize"}
"""Their tolerances end a search, and compare nothing."""

LEFT = {
    "core": (1, "three digits are printed"),
    "exact": (2, "the distance of rows that are built"),
    "fronts": (2, "how far steps of a given size lead"),
    "random": (1, "shares of bits, five deviations wide"),
    "evidence": (10, "tables are printed with few digits, and trainings of other orders of sums compared"),
    "benchmarks": (2, "other methods end within their own tolerance"),
    ".": (2, "how far training has come"),
}
"""By folder, how many there may be, and why. A number may only fall."""


def value(node):
    """The number that an expression of numbers alone stands for, None for others."""
    if any(
        not isinstance(n, ast.Constant | ast.BinOp | ast.UnaryOp | ast.operator | ast.unaryop) for n in ast.walk(node)
    ):
        return None
    try:
        found = eval(compile(ast.Expression(node), "", "eval"))
    except TypeError:
        return None
    return found if isinstance(found, float) else None


def small(node):
    """Whether an expression is a number that is a tolerance: above zero, below a hundredth."""
    number = value(node)
    return number is not None and 0 < abs(number) < 0.01


def name_of(function):
    return getattr(function, "attr", getattr(function, "id", ""))


def bare_tolerances(tree):
    """The lines of tolerances that are numbers."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and name_of(node.func) not in SEARCHES:
            found |= {word.value.lineno for word in node.keywords if word.arg in NAMES and small(word.value)}
            if any(word in name_of(node.func) for word in COMPARING):
                found |= {given.lineno for given in node.args[1:] if small(given)}
        elif isinstance(node, ast.Dict):
            named = [getattr(key, "value", None) in ("atol", "rtol") for key in node.keys]
            found |= {value.lineno for value, tells in zip(node.values, named, strict=True) if tells and small(value)}
        elif isinstance(node, ast.Assert):
            sides = [(c.ops, c.comparators) for c in ast.walk(node.test) if isinstance(c, ast.Compare)]
            found |= {
                side.lineno
                for ops, others in sides
                for op, side in zip(ops, others, strict=True)
                if isinstance(op, ast.Lt | ast.LtE) and small(side)
            }
    return found


def test_no_more_bare_tolerances_than_there_are_reasons():
    found = Counter()
    for path in TESTS.rglob("*.py"):
        found[str(path.parent.relative_to(TESTS))] += len(bare_tolerances(ast.parse(path.read_text())))
    assert {folder: n for folder, n in found.items() if n > LEFT.get(folder, (0, ""))[0]} == {}


def test_bare_tolerances_are_found():
    bare = """
close(x, y, rtol=1e-5, atol=0)
assert x == approx(y, rel=1e-6)
close(x, y, 2.0**-20)
assert error < 1e-9
check_within(x, y, -1e-7)
close(x, y, **{"rtol": 1e-5})
"""
    assert bare_tolerances(ast.parse(bare)) == {2, 3, 4, 5, 6, 7}
