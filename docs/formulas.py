"""The formulas of docstrings as mathematics: they are written as code there, to be read in a terminal."""

import re
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

GREEK = {"alpha", "beta", "gamma", "kappa", "lambda", "mu", "rho", "sigma", "tau", "theta"}
# What stands below or beside its index.
OVER = {"sum": r"\sum", "prod": r"\prod", "max": r"\max", "min": r"\min", "mean": r"\operatorname{mean}"}
OVER |= {"argmin": r"\operatorname{argmin}", "argmax": r"\operatorname{argmax}"}
FUNCTIONS = {"log", "exp", "tanh", "softmax", "diag"}
SIGNS = {"<-": r"\leftarrow", "->": r"\to", "-+": r"\mp", ">=": r"\ge", "<=": r"\le", "*": r"\cdot", "'": r"^\top"}
SIGNS |= {"{": r"\{", "}": r"\}", "...": r"\ldots", "<": "<", ">": ">"}
TOKEN = re.compile(r"for all|for|[A-Za-z]\w*|\d+(?:\.\d+)?(?:e-?\d+)?|<-|->|-\+|>=|<=|\.\.\.|\S|\s+")

_IS_ONE = re.compile(r" (=|<-|<=|>=|<|>|\+|-|/|\*) |(sum|prod|max|min)_|\^|^\|.*\|$")
# Indexing, attributes, keywords, several names on the left, strings, types: what is Python, and no formula.
_IS_CODE = re.compile(
    r"""["\[\]]|[a-z]\.[a-z]|[(,]\s?\*|\*\*|^\w+, |True|\blambda \w+:|\w=|: \w+,|for batch|\*_|\(\)|\)\.[a-z]"""
)


def as_mathematics(text: str) -> str:
    """The text of a docstring, before its example, with `code` that is a formula as a role of RST."""
    before, example, after = text.partition("\nExample:")
    return re.sub(r"`([^`]+)`", lambda found: _role(" ".join(found[1].split()), found[0]), before) + example + after


def _role(code: str, otherwise: str) -> str:
    return f":math:`{latex(code)}`" if _IS_ONE.search(code) and not _IS_CODE.search(code) else otherwise


def latex(code: str) -> str:
    """LaTeX of a formula: names of one letter, of Greek letters and of words, indices, powers, inner products."""
    tokens = TOKEN.findall(code)
    parts: list[str] = []
    for place, token in enumerate(tokens):
        before = tokens[place - 1] if place else " "
        after = tokens[place + 1] if place + 1 < len(tokens) else " "
        if token == "<" and not after.isspace():
            parts.append(r"\langle ")
        elif token == ">" and not before.isspace():
            parts.append(r"\rangle ")
        elif token in ("for", "for all"):
            parts.append(rf"\text{{ {token} }}")
        elif token == "'" and len(before) > 1 and not re.match(r"[\w(]", after):
            parts.append("' ")  # the new value of a name; elsewhere a transpose
        elif re.match(r"[A-Za-z]", token):
            parts.append(_name(token) + " ")
        elif token.isspace() and _between_factors(before, after):
            parts.append(r"\ ")
        else:
            parts.append(SIGNS.get(token, token) + " ")
    return _groups("".join(parts)).strip()


def _between_factors(before: str, after: str) -> bool:
    """Whether a space stands for a product, or keeps words apart."""
    return bool(re.match(r"[\w)}|'>]$|\w", before) and re.match(r"[\w({|<]", after))


def _name(name: str) -> str:
    stem, _, index = name.strip("_").rpartition("_")
    if stem in OVER and len(index) <= 2:
        return f"{OVER[stem]}_{{{index}}}"
    if stem and (len(index) <= 2 or index in GREEK or index in ("before", "after")):
        return f"{_word(stem)}_{{{_word(index) if len(index) > 2 else index}}}"
    return _word(name.strip("_"))


def _word(word: str) -> str:
    if word in OVER:
        return OVER[word]
    if word in FUNCTIONS:
        return rf"\operatorname{{{word}}}"
    if word in GREEK:
        return f"\\{word}"
    if word == "eps":
        return r"\varepsilon"
    if re.fullmatch(r"[A-Za-z]\d", word):
        return f"{word[0]}_{word[1]}"
    return word if len(word) == 1 or word == "sqrt" else r"\mathrm{" + word.replace("_", r"\_") + "}"


def _groups(text: str) -> str:
    """Arguments of roots, and powers of more than one sign, in braces."""
    for opening, head in (("sqrt (", r"\sqrt{"), ("^( ", "^{"), ("^ ( ", "^{")):
        while opening in text:
            start = text.index(opening)
            depth, end = 1, start + len(opening)
            while depth and end < len(text):
                depth += {"(": 1, ")": -1}.get(text[end], 0)
                end += 1
            text = f"{text[:start]}{head}{text[start + len(opening) : end - 1]}}}{text[end:]}"
    return re.sub(r"\^ ?([-+]) ?(\w*)", r"^{\1\2}", re.sub(r"\^ (\\?[A-Za-z0-9]+(?:_\{[^{}]*\})?)", r"^{\1}", text))


def mathml(text: str, *, as_block: bool = False) -> str:
    """MathML of LaTeX, whose braces are as high as what they stand in."""
    found = tex2mathml(text, as_block=as_block)
    return re.sub(r"<mo>([{}])</mo>", r'<mo stretchy="false">\1</mo>', found)


def visit_inline(translator: Any, node: nodes.math) -> None:
    """Write mathematics as MathML, which browsers draw without a script."""
    translator.body.append(mathml(node.astext()))
    raise nodes.SkipNode


def visit_block(translator: Any, node: nodes.math_block) -> None:
    """The same, on lines of its own."""
    translator.body.append(f'<div class="math">{mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode
