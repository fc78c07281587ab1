"""The examples of docstrings run, and print what they say."""

import doctest
import functools
import importlib
import inspect
import pkgutil
from importlib.util import find_spec

import pytest
import torch
from torch import nn

import functional_jd
from functional_jd import testing


def examples():
    """The docstrings with examples, by name."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    modules = [functional_jd, *map(import_one, pkgutil.walk_packages(functional_jd.__path__, "functional_jd."))]
    for module in modules:
        if module is not None:
            for found in finder.find(module, module.__name__):
                if found.examples:
                    yield found.name, found


def import_one(info):
    """The module, unless it is a program, or needs Triton where that is missing."""
    without = "__main__" if find_spec("triton") else ("__main__", "one_launch")
    return None if info.name.endswith(without) else importlib.import_module(info.name)


EXAMPLES = dict(examples())
# The packages that examples name: `from functional_jd import *` and these.
ROOMS = ["aggregation", "aggregators", "diagnostics", "fronts", "objectives", "precision", "views"]
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_prints_what_it_says(name):
    matplotlib = pytest.importorskip("matplotlib")
    pyplot = pytest.importorskip("matplotlib.pyplot")
    package = importlib.import_module(name.rpartition(".")[0]) if "." in name else functional_jd
    while not inspect.ismodule(package):
        package = importlib.import_module(package.__module__)
    session = vars(package) | {key: getattr(testing, key) for key in testing.__all__}
    session |= {key: getattr(functional_jd, key) for key in [*functional_jd.__all__, *ROOMS]}
    session |= {"functional_jd": functional_jd, "torch": torch, "nn": nn}
    session |= {"functools": functools, "matplotlib": matplotlib}
    printed = []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        EXAMPLES[name].globs = session
        result = doctest.DocTestRunner(verbose=False, optionflags=FLAGS).run(EXAMPLES[name], out=printed.append)
    pyplot.close("all")
    assert result.failed == 0, "".join(printed)
