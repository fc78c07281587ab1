"""`python tests/notebooks.py notebooks/*.ipynb`: run notebooks from top to bottom and store them with their outputs."""

import os
import re
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import nbformat
from nbclient import NotebookClient

# What a cell may take; the whole notebook should be done within two minutes.
_LONGEST = 300
# torch 2.15 uses what it deprecates itself; everything else that a kernel prints to stderr is a fault.
_IGNORED = "ignore:`torch.jit.script` is deprecated:FutureWarning"


def run(path: Path) -> Any:
    """The notebook with the outputs of a fresh kernel: whatever a cell raises is raised here."""
    notebook = nbformat.read(path, as_version=4)
    # One thread: several notebooks run at once, and sums come out in the same order.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    client = NotebookClient(notebook, timeout=_LONGEST, kernel_name="python3", resources=_at(path.parent))
    client.execute(env=os.environ | threads | {"PYTHONWARNINGS": _IGNORED})
    return tidy(notebook)


def tidy(notebook: Any) -> Any:
    """Without what differs from run to run and tells nothing: timestamps, the last state of a progress bar only."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for index, cell in enumerate(notebook.cells):
        cell.metadata, cell.id = {}, f"cell-{index:02}"
        for output in cell.get("outputs", []):
            if output.output_type == "stream":
                output.text = re.sub(r"[^\n\r]*\r(?!\n)", "", output.text)
    return notebook


def _at(folder: Path) -> dict[str, Any]:
    return {"metadata": {"path": str(folder)}}


def main(paths: list[str]) -> None:
    """Run each notebook named, and write it back."""
    for path in map(Path, paths):
        start = perf_counter()
        notebook = run(path)
        nbformat.write(notebook, path)
        print(f"{path}: {perf_counter() - start:.0f} s, {path.stat().st_size / 1e3:.0f} kB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
