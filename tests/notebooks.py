"""`python tests/notebooks.py notebooks/*.ipynb`: run notebooks from top to bottom and store them with their outputs."""

import os
import re
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

# What a cell may take; the whole notebook should be done within two minutes.
_LONGEST = 300
# What one notebook leaves behind for the next in the same kernel.
_RESET = "%reset -f\nimport torch\ntorch.set_default_dtype(torch.float32)\n%reset -f"
# torch 2.15 uses what it deprecates itself; everything else that a kernel prints to stderr is a fault.
_IGNORED = "ignore:`torch.jit.script` is deprecated:FutureWarning"


@contextmanager
def kernel(folder: Path) -> Generator[NotebookClient]:
    """A kernel for one notebook after the other in this folder: starting one takes as long as a short notebook."""
    at = {"metadata": {"path": str(folder)}}
    client = NotebookClient(new_notebook(), timeout=_LONGEST, kernel_name="python3", resources=at)
    with client.setup_kernel(env=_environment()):
        yield client


def run(path: Path, client: NotebookClient) -> Any:
    """The notebook with the outputs of a kernel without names: what a cell raises is raised here."""
    notebook = nbformat.read(path, as_version=4)
    client.nb = new_notebook(cells=[new_code_cell(_RESET)])
    client.execute_cell(client.nb.cells[0], 0)
    client.nb = notebook
    client.reset_execution_trackers()
    for index, cell in enumerate(notebook.cells):
        client.execute_cell(cell, index)
    return tidy(notebook)


def _environment() -> dict[str, str]:
    # One thread: several notebooks run at once, and sums come out in the same order.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return os.environ | threads | {"PYTHONWARNINGS": _IGNORED}


def tidy(notebook: Any) -> Any:
    """Without what differs from run to run and tells nothing: timestamps, the last state of a progress bar only."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for index, cell in enumerate(notebook.cells):
        tags = cell.metadata.get("tags")  # which fold code on the site
        cell.metadata, cell.id = {"tags": tags} if tags else {}, f"cell-{index:02}"
        for output in cell.get("outputs", []):
            if output.output_type == "stream":
                output.text = re.sub(r"[^\n\r]*\r(?!\n)", "", output.text)
    return notebook


def main(paths: list[str]) -> None:
    """Run each notebook named, and write it back."""
    for path in map(Path, paths):
        start = perf_counter()
        with kernel(path.parent) as fresh:
            notebook = run(path, fresh)
        nbformat.write(notebook, path)
        print(f"{path}: {perf_counter() - start:.0f} s, {path.stat().st_size / 1e3:.0f} kB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
