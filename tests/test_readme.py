"""Every block of the README and the guides runs, each page by itself, and prints what is shown; no link is broken."""

import copy
import re
import subprocess
import sys
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from types import ModuleType

import pytest
import torch
from benchmarks.page import cpu_rows
from rule_table import RULES

import functional_jd
from functional_jd.core.tree import all_finite

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDES = "objectives private diagnose own_rule recipes compile fronts physics devices trainers"
OTHERS = "reference coming_from rules evidence benchmarks limits contributing"
PAGES = {
    path: path.read_text(encoding="utf-8")
    for path in [
        ROOT / "README.md",
        *(ROOT / f"docs/guides/{page}.md" for page in GUIDES.split()),
        *(ROOT / f"docs/{page}.md" for page in OTHERS.split()),
    ]
}
REPORTS = [
    ROOT / "tests/benchmarks/REPORT.md",
    ROOT / "tests/evidence/REPORT.md",
    ROOT / "tests/claims/LAWS_OF_TORCHJD.md",
    ROOT / "tests/engines/OWN_KIND.md",
]
FENCED = r"```(\w+)\n(.*?)```(?:\n\n```text\n(.*?)```)?"
BLOCKS = [
    (path, *block)
    for path, text in PAGES.items()
    # The loops above that heading need packages of their own: tests/models runs them.
    for block in re.findall(FENCED, text.rpartition("\n## Float16 post-training\n")[2], flags=re.DOTALL)
]
DIFFS = [code for _, language, code, _ in BLOCKS if language == "diff"]


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """What the reader has after typing all blocks of a page into a new session, by page, and what each printed."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    modules, printed = {path.stem: ModuleType(f"reader_of_{path.stem}") for path in PAGES}, []
    sessions = {page: vars(module) for page, module in modules.items()}
    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng():
        patch.chdir(tmp_path_factory.mktemp("reader"))
        for module in modules.values():
            patch.setitem(sys.modules, module.__name__, module)  # where torch.compile looks for what is global
        for session in sessions.values():
            patch.setitem(session, "print", lambda *words: printed[-1].append(" ".join(map(str, words))))
        torch.manual_seed(0)
        for path, language, code, _ in BLOCKS:
            if language == "python":
                printed.append([])
                exec(compile(code, path.name, "exec"), sessions[path.stem])
    pyplot.close("all")
    return sessions, ["\n".join(lines) for lines in printed]


def test_every_python_block_runs(shown):
    sessions, printed = shown
    assert all_finite((sessions["README"]["state"], sessions["recipes"]["direction"], sessions["recipes"]["params"]))
    assert "cost" in "".join(printed)


def test_what_is_shown_below_a_block_is_what_it_prints(shown):
    expected = [text for _, language, _, text in BLOCKS if language == "python"]
    compared = [(text.strip(), found) for text, found in zip(expected, shown[1], strict=True) if text]
    assert compared
    for text, found in compared:
        assert text == found


def test_a_comparison_that_swallows_nan_is_mended_as_the_page_says(shown):
    page = shown[0]["own_rule"]
    page["test_a_temperature_out_of_range"]()
    rows, nan = page["rows"], torch.tensor(torch.nan)

    def weights(c, cure):
        clipping = lambda n: torch.where(n > c, c / n, 1) * (torch.where(c > 0, 1.0, torch.nan) if cure else 1)
        rule = functional_jd.stateless(functional_jd.views.norms, clipping)
        return functional_jd.aggregate(rule, rows).weights

    assert weights(nan, cure=False).isfinite().all()
    assert weights(nan, cure=True).isnan().all()
    assert weights(torch.tensor(-1.0), cure=True).isnan().all()
    assert torch.equal(weights(torch.tensor(1.0), cure=True), weights(torch.tensor(1.0), cure=False))


def side(diff, sign, session):
    """The names that one side of a diff leaves, started from copies of the modules of the session."""
    lines = [line[1:] for line in diff.splitlines() if line[:1] in (sign, " ")]
    names = copy.deepcopy({name: session[name] for name in ("trunk", "heads", "net") if name in session})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        exec(compile("\n".join(lines), "README.md", "exec"), found := {**session, **names})
    return found


def values(*modules):
    return {f"{place}.{name}": leaf.detach() for place, m in enumerate(modules) for name, leaf in m.named_parameters()}


def agree(before, after, start):
    """Whether two trainings went the same way: their distance, measured by how far they went."""
    apart = sum(float((before[name] - after[name]).square().sum()) for name in start)
    return apart <= 1e-6 * sum(float((before[name] - start[name]).square().sum()) for name in start) > 0


def test_after_the_way_from_gradscaler_training_is_the_same(shown):
    (diff,) = [diff for diff in DIFFS if "GradScaler" in diff]
    start = shown[0]["coming_from"]
    sides = [side(diff, "-", start), side(diff, "+", start), side(diff.splitlines()[0], " ", start)]
    assert agree(*(values(found["model"]) for found in sides))


def test_after_the_way_from_torchjd_training_is_the_same(shown):
    (diff,) = [diff for diff in DIFFS if "torchjd" in diff]
    start = shown[0]["coming_from"]
    modules = [start["trunk"], start["heads"]]
    found = side(diff, "+", start)["state"].params
    after = copy.deepcopy(modules)
    after[0].load_state_dict(found["shared"])
    for name, head in after[1].items():
        head.load_state_dict(found["heads"][name])
    if find_spec("torchjd") is None:
        pytest.skip("torchjd is not installed: the other side of the diff is not run")
    found = side(diff, "-", start)
    assert agree(values(found["trunk"], found["heads"]), values(*after), values(*modules))


def test_a_float16_loop_changes_by_the_lines_that_are_shown():
    (diff,) = [diff for diff in DIFFS if "jd.weigh" in diff and "scaler" in diff]
    page = PAGES[ROOT / "docs/guides/trainers.md"]
    before, after = re.findall(r"```python\n(torch.manual_seed.*?)```", page, re.DOTALL)
    lines = diff.splitlines()
    for sign, loop in (("-", before), ("+", after)):
        changed = [line[1:] for line in lines if line[:1] == sign]
        others = [line for line in loop.splitlines() if line not in changed]
        assert set(changed) <= set(loop.splitlines())
        assert others == [x for x in before.splitlines() if f"-{x}" not in lines]
    assert sum(line[:1] in "+-" for line in lines) <= 15


def test_the_loop_that_weighs_trains_as_steps_do(shown):
    """And the loop without a rule as steps under `mean`: the factor of the sum is all that a rule changes."""
    (diff,) = [diff for diff in DIFFS if "jd.weigh" in diff and not re.search("scaler|accelerator|transformers", diff)]
    session = shown[0]["README"]
    start = dict(session["net"].named_parameters())
    for sign, rule in (("-", functional_jd.mean()), ("+", functional_jd.upgrad())):
        net = side(diff, sign, session)["net"]
        method = session["method"] | {"aggregator": rule}
        batch = session["x"], session["cost"], session["hours"]
        state = functional_jd.train_state(copy.deepcopy(start), *batch, **method)
        for _ in range(100):
            state, _ = functional_jd.step(state, *batch, **method)
        assert agree({f"0.{name}": p for name, p in state.params.items()}, values(net), values(session["net"]))


def test_the_figures_of_the_readme_are_those_of_the_tables():
    """Those of the picture: tests/test_demo.py."""
    assert f"**{len(RULES)} aggregation rules**" in README
    (problems,) = re.findall(r"our (\d+) test problems", README)
    report = REPORTS[1].read_text(encoding="utf-8")
    assert f"Of {problems} problems" in report
    (cells,) = re.findall(r"^\| `nash_mtl\(\)` \| (\d+ / .*?) \| (.*?) \|", report, flags=re.MULTILINE)
    ahead, _, behind = (sum(map(int, parts)) for parts in zip(*(cell.split(" / ") for cell in cells), strict=True))
    assert f"On {ahead} of our {problems} test problems `nash_mtl()` is ahead, and on {behind} behind" in README
    assert f"is ahead on {ahead} of {problems} problems, and behind on {behind}" in PAGES[ROOT / "docs/evidence.md"]
    benchmarks = PAGES[ROOT / "docs/benchmarks.md"]
    for tasks in (2, 8):
        found = [row["to plain"] for name, row in cpu_rows(benchmarks).items() if name.endswith(f" {tasks} tasks")]
        for text in (README, benchmarks):
            assert f"{min(found):.1f} to {max(found):.1f} times" in " ".join(text.split()), tasks


def test_the_figures_of_the_evidence_are_those_of_its_report():
    figures = lambda text: set(re.findall(r"\d+(?:\.\d+)+", text))
    assert figures(PAGES[ROOT / "docs/evidence.md"]) <= figures(REPORTS[1].read_text(encoding="utf-8"))


def test_every_command_is_there():
    consoles = [code for _, language, code, _ in BLOCKS if language == "console"]
    commands = [line.split("#")[0].split() for code in consoles for line in code.splitlines()]
    assert ["git", "clone"] in [command[:2] for command in commands]
    assert ["make", "demo"] in commands
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for command in commands:
        if command[0] == "make":
            subprocess.run([*command, "--dry-run"], cwd=ROOT, check=True, capture_output=True)
        elif command[0] == "git":
            assert command[:2] == ["git", "clone"]
        elif command[0] == "pip":
            extra = re.fullmatch(r'pip install "?\.(?:\[(\w+)\])?"?', " ".join(command)).group(1)
            assert extra is None or f"\n{extra} = [" in project
        else:  # test_distributed runs it
            assert command[0] == "torchrun"
            assert (ROOT / command[-1]).exists()


def anchors(text):
    """The headings of a page, as links name them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *REPORTS], ids=lambda page: page.stem)
def test_every_link_leads_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\((.*?)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        if not link.startswith("https://"):
            place, _, anchor = link.partition("#")
            target = (page.parent / place).resolve() if place else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), link


def test_no_page_is_forgotten():
    assert {*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"} == PAGES.keys()


def test_the_readme_is_short():
    first = README.partition("## Example")[0]
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert 700 <= len(README.split()) <= 950
    assert example.count("\n") <= 20
    assert all(command in first for command in ("git clone", "pip install .", "make demo", "make test"))


def test_every_notebook_is_linked():
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        assert f"](../notebooks/{path.name})" in PAGES[ROOT / "docs/reference.md"]


def test_the_names_in_the_text_are_there():
    for name in re.findall(r"\bjd\.(\w+(?:\.\w+)*)", "\n".join(PAGES.values())):
        assert attrgetter(name)(functional_jd), name
    assert f"| {len(RULES)}, and any scalarization" in PAGES[ROOT / "docs/coming_from.md"]


def test_no_block_is_left_untested():
    assert {language for _, language, _, _ in BLOCKS} <= {"python", "console", "text", "diff"}
