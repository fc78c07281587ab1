"""Valid calls of keys and of what is drawn from them."""

import torch
from fuzz_values import Argument, call, x
from garbage import CALLABLE, kinds

from functional_jd import random

NUMBER = kinds({"minus_one", "zero"})
RANDOM = {
    "key": call(random.key, seed=Argument(0, NUMBER)),
    "split": call(random.split),
    "fold_in": call(random.fold_in, number=Argument(2, NUMBER)),
    "uniform": call(random.uniform, shape=(2,)),
    "normal": call(random.normal, shape=(2,)),
    "permutation": call(random.permutation),
    "keyed": call(
        lambda f, key: random.keyed(f)(key, x()), f=Argument(lambda: torch.nn.functional.dropout, CALLABLE, True)
    ),
}
