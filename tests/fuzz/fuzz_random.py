"""Valid calls of keys and of what is drawn from them."""

import torch
from fuzz_values import WHERE, key, x
from garbage import CALLABLE, OPTION, Call, kinds

from functional_jd import random

RANDOM = {
    "key": Call(
        random.key,
        lambda: {"seed": 0, "device": WHERE["now"]},
        {"seed": kinds({"minus_one", "zero"}), "device": OPTION},
    ),
    "split": Call(random.split, lambda: {"key": key(0), "n": 2}, {"n": kinds({"zero"})}),
    "fold_in": Call(random.fold_in, lambda: {"key": key(0), "number": 2}, {"number": kinds({"minus_one", "zero"})}),
    "uniform": Call(
        random.uniform, lambda: {"key": key(0), "shape": (2,), "dtype": torch.float32}, {"shape": kinds({"list"})}
    ),
    "normal": Call(
        random.normal, lambda: {"key": key(0), "shape": (2,), "dtype": torch.float32}, {"shape": kinds({"list"})}
    ),
    "permutation": Call(random.permutation, lambda: {"key": key(0), "n": 2}, {"n": kinds({"zero"})}),
    "keyed": Call(
        lambda f, key: random.keyed(f)(key, x()),
        lambda: {"f": torch.nn.functional.dropout, "key": key(0)},
        {"f": CALLABLE},
        kinds({"f"}),
    ),
}
