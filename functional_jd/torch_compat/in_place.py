"""Which ops change a tensor that they receive, and which one."""

from typing import Any

import torch
from torch import Tensor, nn

from functional_jd.torch_compat.batch_statistics import BATCH_NORMS


def changes_in_place(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an op may change a tensor that it receives."""
    if func in _WITH_CHOICE:
        position, name, default = _WITH_CHOICE[func]
        choice = args[position] if len(args) > position else kwargs.get(name, default)
        return choice is not None and choice is not False
    if func in IN_PLACE or "out" in kwargs:
        return True
    return func in WITH_FLAG and (kwargs.get("inplace") is True or (len(args) > 1 and args[-1] is True))


def targets_of(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """What an op changes in place, if it does."""
    if func in WITH_STATISTICS:
        inputs = (
            "input running_mean running_var" if func in _PYTHON_NORMS else "input weight bias running_mean running_var"
        )
        given = dict(zip(inputs.split(), args, strict=False)) | kwargs
        return [given.get("running_mean"), given.get("running_var")]
    if func in _EMBEDDINGS:  # they shorten rows of their weight
        return [args[1] if len(args) > 1 else kwargs.get("weight")]
    out = kwargs.get("out")
    return [x for given in (*args[:1], out) for x in (given if isinstance(given, tuple | list) else [given])]


_PYTHON_NORMS = {nn.functional.batch_norm, nn.functional.instance_norm}
_EMBEDDINGS = {nn.functional.embedding, nn.functional.embedding_bag}
WITH_STATISTICS = {*BATCH_NORMS, *_PYTHON_NORMS, torch.instance_norm}
# Whether these change what they receive, a weight or statistics, is an argument: its position, name and default.
_WITH_CHOICE: dict[Any, tuple[int, str, Any]] = {
    **dict.fromkeys((*BATCH_NORMS, nn.functional.batch_norm), (5, "training", False)),
    **dict.fromkeys((torch.instance_norm, nn.functional.instance_norm), (5, "use_input_stats", True)),
    **dict.fromkeys(_EMBEDDINGS, (3, "max_norm", None)),
}
WITH_FLAG = {
    f for f in vars(nn.functional).values() if "inplace" in getattr(getattr(f, "__code__", None), "co_varnames", ())
}
_OPERATORS = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "setitem")
_METHODS = [name for name in dir(Tensor) if name.endswith("_") and name[0] != "_"]
IN_PLACE_NAMES = frozenset([*_METHODS, *(f"__{name}__" for name in _OPERATORS if hasattr(Tensor, f"__{name}__"))])
"""The names of methods that change their tensor."""
IN_PLACE = (
    {getattr(Tensor, name) for name in IN_PLACE_NAMES if name != "requires_grad_"}
    | {f for home in (torch, nn.functional, nn.init) for name, f in vars(home).items() if name[-1] == "_" != name[0]}
    | {f for name, f in vars(torch).items() if name.startswith("_foreach_") and name[-1] == "_"}
    | WITH_STATISTICS
    | _EMBEDDINGS
)
