"""Every code block of the README runs, as printed and in order; its commands are those of the Makefile."""

import re
import subprocess
from pathlib import Path

import torch

from functional_jd.tree import all_finite

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


def test_every_python_block_runs(capsys):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        shown = {}
        for language, code in BLOCKS:
            if language == "python":
                exec(compile(code, "README.md", "exec"), shown)  # the reader types all of them into one session
    assert all_finite((shown["state"], shown["direction"], shown["params"]))
    assert "kind" in capsys.readouterr().out


def test_every_command_is_there():
    consoles = [code for language, code in BLOCKS if language == "console"]
    commands = [line.split("#")[0].split() for code in consoles for line in code.splitlines()]
    assert ["make", "demo"] in commands
    for command in commands:
        if command[0] == "make":
            subprocess.run([*command, "--dry-run"], cwd=ROOT, check=True, capture_output=True)
        else:  # test_distributed runs it
            assert command[0] == "torchrun"
            assert (ROOT / command[-1]).exists()


def test_no_block_is_left_untested():
    assert {language for language, _ in BLOCKS} <= {"python", "console", "text"}
