"""Checkpoints: states as flat dicts of plain tensors by name, with checksums and the names of rule and optimizer."""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor

from functional_jd.aggregation.aggregate import Aggregator, check_rule
from functional_jd.core.agreement import checksums, function_names
from functional_jd.core.arguments import check_flag, check_mapping, check_type, described, here
from functional_jd.core.sharding import is_sharded, laid_out_as
from functional_jd.core.tree import check_layouts, named_nodes, tree_flatten, tree_leaves
from functional_jd.optimizers.base import Optimizer
from functional_jd.training.state import few

State = TypeVar("State")

VERSION = 2  # of the format; version 1 had weaker checksums
_VERSION, _FIELDS, _SUMS = "functional_jd.version", "functional_jd.fields", "functional_jd.checksums"
_METHOD = {"aggregator": "functional_jd.aggregator", "optimizer": "functional_jd.optimizer"}
_OWN = {_VERSION, _FIELDS, _SUMS, *_METHOD.values()}


def to_checkpoint(
    state: Any, *, aggregator: Aggregator | None = None, optimizer: Optimizer | None = None, whole: bool = False
) -> dict[str, Tensor]:
    """Turn a state into a flat dict of plain tensors by dotted name.

    Args:
        state: from `train_state` or `step`, or any pytree of tensors.
        aggregator, optimizer: those that made the state, whose names are written: states of some are equal.
        whole: whether `DTensor`s are gathered, on all ranks at one time, for safetensors or `torch.save` by one rank.

    Returns:
        A dict of tensors, for `torch.save`, safetensors or `torch.distributed.checkpoint`: copies, detached, contiguous
        and with memory of their own; `DTensor`s stay sharded unless `whole`. Entries named `functional_jd.*` hold the
        version, the fields of records, checksums, and the names of rule and optimizer.

    Raises:
        TypeError: a leaf is not a tensor.
        ValueError: two leaves have the same name; `DTensor`s with placements other than `Shard` and `Replicate`, as of
            tensor parallelism below `fully_shard`, unless `whole`.

    Guarantees:
        `from_checkpoint(to_checkpoint(state), like=state)` is the state, bit by bit.
        Checksums of sharded tensors are those of whole ones: all ranks add up their parts, at the same time.

    Example:
        >>> sorted(to_checkpoint({"w": torch.ones(2)}))
        ['functional_jd.checksums', 'functional_jd.fields', 'functional_jd.version', 'w']
    """
    check_flag("whole", whole)
    method = _names(aggregator, optimizer)
    leaves, _, records = _named(state)
    if not whole:
        check_layouts(tree_leaves(state), state)  # checksums need shards that are where the mesh places them
    entries: dict[str, Tensor] = {}
    for name, leaf in leaves.items():
        own: Any = cast(Any, leaf).full_tensor() if whole and is_sharded(leaf) else leaf
        entries[name] = own.detach().clone(memory_format=torch.contiguous_format)
    entries[_FIELDS] = _written(records)
    entries |= {_METHOD[what]: _written(names) for what, names in method.items()}
    sums = list(_sums(entries).values())
    return entries | {_VERSION: torch.tensor(VERSION, device="cpu"), _SUMS: torch.tensor(sums, device="cpu")}


def from_checkpoint(
    checkpoint: Mapping[str, Tensor],
    like: State,
    *,
    aggregator: Aggregator | None = None,
    optimizer: Optimizer | None = None,
) -> State:
    """Turn what `to_checkpoint` returned into a state again. Names decide, never positions.

    Args:
        checkpoint: the dict of tensors, as it was saved, on any device, sharded or not.
        like: a state with the structure, shapes, dtypes, devices and shards that are expected, such as
            `train_state(params, *batch, **method)`; its values are not used. The exception: a field that was added to
            a record after the checkpoint was written keeps the value of `like`.
        aggregator, optimizer: those of `like`; needed if the checkpoint names one, which must be the same.

    Returns:
        A state like `like`: new tensors with the values of the checkpoint.

    Raises:
        TypeError: `checkpoint` is not a dict of tensors, or a leaf of `like` is not a tensor.
        ValueError: another version of the format; records of another class; names that are missing or unknown; another
            shape or dtype; a checksum that differs (checkpoints of older versions have none); another rule or
            optimizer; `DTensor`s in `like` with placements other than `Shard` and `Replicate`.
    """
    method = _names(aggregator, optimizer)
    expected, structure, records = _named(like)
    check_layouts(tree_leaves(like), like)
    _check_whole(checkpoint)
    added = _added(_read(checkpoint[_FIELDS]), records)
    kept = {name for name in expected if name not in checkpoint and f"{name}.".startswith(added)}
    missing, unknown = sorted({*expected} - kept - {*checkpoint}), sorted({*checkpoint} - {*expected} - _OWN)
    if missing or unknown:
        found = f"{few(missing) or 'none'} missing and {few(unknown) or 'none'} unknown"
        _refuse("the names of `like`", found, _START)
    _check_method(checkpoint, method)
    leaves: list[Any] = []
    for name, leaf in expected.items():
        found = leaf if name in kept else checkpoint[name]
        if found.shape != leaf.shape or found.dtype != leaf.dtype:
            like_this = f"{leaf.dtype} {list(leaf.shape)} in {name!r}, as in `like`"
            _refuse(like_this, f"{found.dtype} {list(found.shape)}", _START)
        # The strides of `like`, which decide how some ops round; `like` may have no memory at all.
        target = torch.empty_like(found if leaf.is_meta else leaf)
        leaves.append(target.copy_(laid_out_as(found.detach(), target)))
    return structure.unflatten(leaves)


_START = "Start `like` from the model, the losses and the method that wrote the checkpoint."


def _refuse(expected: str, found: str, cure: str) -> NoReturn:
    raise ValueError(f"from_checkpoint: expected {expected}, found {found}. {cure}")


def _names(aggregator: Any, optimizer: Any) -> dict[str, list[str]]:
    """The names of the functions that the rule and the optimizer, if given, are made of."""
    if aggregator is not None:
        check_rule(aggregator)
    if optimizer is not None:
        check_type("optimizer", optimizer, Optimizer, "Call its builder: adamw().")
    given = {"aggregator": aggregator, "optimizer": optimizer}
    return {what: function_names(x, what == "aggregator") for what, x in given.items() if x is not None}


def _named(tree: Any) -> tuple[dict[str, Tensor], Any, dict[str, list[str]]]:
    """The leaves by name, the structure, and by name the class and the fields of each record."""
    leaves, structure = tree_flatten(tree)
    nodes = named_nodes(structure)
    names = [path or "value" for path, kind in nodes if kind is None]
    records = {path: [kind.__name__, *kind._fields] for path, kind in nodes if hasattr(kind, "_fields")}
    for name, leaf in zip(names, leaves, strict=True):
        if not isinstance(leaf, Tensor) or leaf.layout != torch.strided:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"{here()}: all leaves must be tensors, and dense, found {described(leaf)} in {name!r}. Make "
                "numbers tensors, torch.as_tensor(...), and leave out the rest, or register its container with "
                "torch.export.register_dataclass."
            )
    twice = sorted(name for name, count in Counter([*names, *_OWN]).items() if count > 1)
    if twice:
        raise ValueError(f"{here()}: expected leaves with different names, found {few(twice)} twice. Rename the keys.")
    return dict(zip(names, leaves, strict=True)), structure, records


def _check_whole(checkpoint: Any) -> None:
    """Raise for what `to_checkpoint` did not return, and for tensors that are not as they were written."""
    cure = "Pass the flat dict of tensors that to_checkpoint returned."
    check_mapping("checkpoint", checkpoint, cure)
    for name, value in checkpoint.items():
        check_type(f"checkpoint[{name!r}]", value, Tensor, cure)
    entries = cast("Mapping[str, Tensor]", checkpoint)
    version: Any = entries[_VERSION].tolist() if {_VERSION, _FIELDS} <= entries.keys() else "none"
    if version not in (1, VERSION):
        cure = "Read it with the version of functional_jd that wrote it."
        _refuse(f"a checkpoint of version 1 or {VERSION}", f"version {version}", cure)
    if _SUMS not in entries:  # written by an older version
        return
    found, expected = _sums(entries, version > 1), entries[_SUMS].reshape(-1).tolist()
    damaged = [name for (name, value), written in zip(found.items(), expected, strict=False) if value != written]
    if damaged or len(found) != len(expected):
        others = f"others in {few(damaged or [_SUMS])}: their checksums differ"
        cure = "The file is damaged, or entries were changed: take another checkpoint."
        _refuse("tensors as they were written", others, cure)


def _read(entry: Tensor) -> Any:
    return json.loads(bytes(entry.tolist()).decode())


def _written(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).clone()


def _sums(entries: Mapping[str, Tensor], mixed: bool = True) -> dict[str, int]:
    """The checksum of each entry that is not meta, by sorted name."""
    names = sorted(name for name in entries if name not in (_VERSION, _SUMS))
    return dict(zip(names, map(int, checksums([entries[name] for name in names], mixed)), strict=True))


def _check_method(checkpoint: Mapping[str, Tensor], given: dict[str, list[str]]) -> None:
    """Raise for a state of another rule or optimizer, if the checkpoint names them."""
    for what, entry in _METHOD.items():
        written, expected = _read(checkpoint[entry]) if entry in checkpoint else [], given.get(what, [])
        if written and written != expected:
            wanted = f"a state of {' of '.join(expected)}" if expected else f"{what}= to be given, since it is named"
            cure = f"Pass the {what} that wrote the checkpoint and start `like` with it."
            _refuse(wanted, f"one of {' of '.join(written)}", f"{cure} A checkpoint without names fits all.")


def _added(written: dict[str, list[str]], expected: dict[str, list[str]]) -> tuple[str, ...]:
    """The fields, each with a dot at its end, that were added to records since. Raise for records of another class."""
    found: list[str] = []
    for path, (kind, *fields) in expected.items():
        was, *others = written.get(path, [kind, *fields])
        if was != kind:
            _refuse(f"{kind} in {path or 'the state'!r}, as in `like`", was, _START)
        found += [f"{path}.{field}.".removeprefix(".") for field in fields if field not in others]
    return tuple(found)
