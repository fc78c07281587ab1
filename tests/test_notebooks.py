"""Every notebook runs from top to bottom, and is stored with what it shows."""

import re
from pathlib import Path

import nbformat
import pytest

import notebooks

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
PICTURE = "image/png"


def kinds(notebook):
    """By cell, what a reader sees below it: printed text (True) and pictures (how many)."""
    shown = []
    for cell in notebook.cells:
        outputs = cell.get("outputs", [])
        shown.append((bool(outputs), sum(PICTURE in output.get("data", {}) for output in outputs)))
    return shown


def texts(notebook):
    """All text that a notebook stores beside its code."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            yield output.get("text", "")
            yield from (text for kind, text in output.get("data", {}).items() if kind != PICTURE)


# Numbers in words; smaller ones count things that a reader sees.
WORDS = {"fifteen": 15, "sixteen": 16, "eighteen": 18, "twenty": 20, "thirty": 30, "forty": 40, "fifty": 50}
WORDS |= {"sixty": 60, "ninety": 90, "hundred": 100, "thousand": 1000}
NUMBER = r"(?<![\w.])\d+(?:\.\d+)?(?![\w])"
CHAPTER = r"[Nn]otebooks? \d+|^#.*$"
CODE = r"```.*?```|`[^`]*`|\$[^$]*\$|\]\([^)]*\)"


def claimed(text):
    """The numbers that a text states, outside of code, formulas, links and headings, above two."""
    prose = re.sub(CHAPTER, " ", re.sub(CODE, " ", text, flags=re.DOTALL), flags=re.MULTILINE)
    digits = [float(found) for found in re.findall(NUMBER, prose)]
    return {number for number in digits if number > 2} | {
        n for word, n in WORDS.items() if re.search(rf"\b{word}\b", prose)
    }


def shown(notebook):
    """The numbers that its cells set or print."""
    code = "\n".join([cell.source for cell in notebook.cells if cell.cell_type == "code"] + list(texts(notebook)))
    return {float(found) for found in re.findall(r"\d+(?:\.\d+)?", code.replace("_", " "))}


def stored(path):
    return nbformat.read(path, as_version=4)


def test_all_of_them_are_there():
    assert [path.name[:2] for path in NOTEBOOKS] == [f"{n:02}" for n in range(1, len(NOTEBOOKS) + 1)]


@pytest.fixture(scope="module")
def kernel():
    with notebooks.kernel(FOLDER) as client:
        yield client


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_and_shows_what_is_stored(path, kernel):
    fresh = notebooks.run(path, kernel)
    assert kinds(fresh) == kinds(stored(path))
    for cell in fresh.cells:
        for output in cell.get("outputs", []):
            # A bar of tqdm is all that may go to stderr: a warning would look like a fault to the reader.
            assert output.get("name") != "stderr" or re.search(r"\d+/\d+|\d+step", output.text), output.text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_begins_with_what_is_seen_and_ends_with_what_to_try(path):
    cells = stored(path).cells
    assert cells[0].cell_type == cells[-1].cell_type == "markdown"
    assert cells[0].source.startswith("# ")
    assert "you will see" in cells[0].source.lower()
    assert "to try" in cells[-1].source.lower()
    assert sum(count for _, count in kinds(stored(path))) >= 1


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_nothing_of_the_machine_is_stored(path):
    assert path.stat().st_size < 2e6
    for text in texts(stored(path)):
        assert not re.search(r"/(home|root|tmp|usr|work|Users)/|Traceback|Warning", text), text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_number_in_the_text_is_set_or_printed_by_a_cell(path):
    """But for what is left to try, in the last cell. Code, formulas and headings may hold any number."""
    notebook = stored(path)
    prose = [cell.source.partition("## What to try")[0] for cell in notebook.cells if cell.cell_type == "markdown"]
    assert set().union(*map(claimed, prose)) <= shown(notebook)


def test_claims_are_numbers_outside_of_code():
    text = "# 9 tries\nSee notebook 7: `f(8)` costs fifteen of 2 or $3^2$, 4.5 times [it](a5.md), 60 % in float16."
    assert claimed(text) == {15, 4.5, 60}
