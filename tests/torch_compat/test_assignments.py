"""Assignments to attributes of modules are noted before they are done, in this thread alone, and can be put back."""

from threading import Thread

import torch
from torch import nn

from functional_jd.torch_compat.assignments import noting_assignments, put_back


class Changing(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.count = nn.Parameter(torch.ones(2)), 0
        self.register_buffer("center", torch.zeros(2))

    def forward(self):
        self.count, self.center, self.last = 1, self.center + 1, self.weight
        self.weight = nn.Parameter(torch.zeros(2))
        del self._parameters["weight"]
        self.weight = torch.zeros(2)  # as reparametrizations do


def test_attributes_parameters_and_buffers_get_their_values_back_and_new_ones_go():
    module, undone, own = Changing(), [], nn.Module.__setattr__
    before = dict(vars(module)), dict(module.named_parameters()), dict(module.named_buffers())
    with noting_assignments(lambda module, name: undone.append(put_back(module, name))):
        module()
        assert (module.count, module.center.tolist(), module.weight.tolist()) == (1, [1, 1], [0, 0])
    assert nn.Module.__setattr__ is own
    for undo in reversed(undone):
        undo()
    after = vars(module), dict(module.named_parameters()), dict(module.named_buffers())
    for old, new in zip(before, after, strict=True):
        assert list(old) == list(new)
        assert all(new[name] is value for name, value in old.items())


def test_other_threads_are_not_noted_and_contexts_nest():
    module, names, inner = nn.Module(), [], []
    with noting_assignments(lambda _, name: names.append(name)):
        thread = Thread(target=lambda: setattr(module, "elsewhere", 1))
        thread.start()
        thread.join()
        with noting_assignments(lambda _, name: inner.append(name)):
            module.within = 1
        module.here = 1
    module.after = 1
    assert (names, inner) == (["here"], ["within"])
