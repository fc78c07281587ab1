"""The diffs of the page on post-training for Accelerate and `Trainer`, with the libraries if these are installed.

Without them, a loop with their calls stands for them.
"""

import copy
import re
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bounds import check_same, eps

import functional_jd as jd

PAGE = (Path(__file__).parents[1] / "docs/guides/trainers.md").read_text(encoding="utf-8")
PAGE = PAGE.partition("\n## Float16 post-training\n")[2]
MODEL, *_ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
DIFFS = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
FIXED = {"policy": 1.0, "value": 1.0, "kl": 0.1, "entropy": 0.01}  # not in the order of the weights


def side(sign, mark):
    """The code of one side of the diff with a mark."""
    (diff,) = [diff for diff in DIFFS if mark in diff]
    return "\n".join(line[1:] for line in diff.splitlines() if line[:1] in ("", " ", sign))


class StandIn:
    """The calls of `accelerate.Accelerator` that the diff makes, on one CPU."""

    def __init__(self, gradient_accumulation_steps=1, **_):
        self.every, self.count, self.sync_gradients = gradient_accumulation_steps, 0, True

    def prepare(self, model, optimizer):
        step, zero = optimizer.step, optimizer.zero_grad
        optimizer.step = lambda: step() if self.sync_gradients else None
        optimizer.zero_grad = lambda: zero() if self.sync_gradients else None
        return model, optimizer

    @contextmanager
    def accumulate(self, model):
        self.count += 1
        self.sync_gradients = self.count % self.every == 0
        yield

    def autocast(self):
        return torch.autocast("cpu", torch.bfloat16, enabled=False)

    def backward(self, loss):
        (loss / self.every).backward()


def session():
    names = {}
    exec(compile(MODEL, "post_training", "exec"), names)
    torch.manual_seed(0)
    policy = names["Policy"]()
    reference = copy.deepcopy(policy).requires_grad_(False)
    with torch.no_grad():
        policy.tokens.weight.add_(0.1)
    rows = [torch.randint(32, (8, 9)) for _ in range(4)]
    own = {"policy": policy, "model": policy, "reference": reference, "batches": rows, "fixed": FIXED, "torch": torch}
    own |= {"rule": jd.constant([FIXED[name] for name in sorted(FIXED)]), "scales": jd.scale_state(shape=4)}
    return names | own | {"memory": None}


def by_accelerate(sign, rule, own):
    if find_spec("accelerate") is None or own:
        kind = StandIn
    else:
        import accelerate

        kind = lambda **how: accelerate.Accelerator(cpu=True, **how)
    names = session()
    names["rule"] = names["rule"] if rule is None else rule
    optimizer = torch.optim.SGD(names["policy"].parameters(), lr=0.1)
    names["accelerator"] = kind(gradient_accumulation_steps=2)
    names["model"], names["optimizer"] = names["accelerator"].prepare(names["policy"], optimizer)
    exec(compile(side(sign, "accelerator.backward"), "diff", "exec"), names)
    return names


@pytest.mark.parametrize("own", [True, False], ids=["stand-in", "accelerate"])
def test_under_fixed_weights_both_sides_for_accelerate_train_alike(own):
    before, after = (by_accelerate(sign, None, own) for sign in "-+")
    torch.testing.assert_close(after["policy"].state_dict(), before["policy"].state_dict())
    assert not torch.equal(after["policy"].tokens.weight, session()["policy"].tokens.weight)
    assert torch.equal(after["scales"].growth_tracker, torch.full((4,), 4, dtype=torch.int32))


def test_a_rule_for_accelerate_takes_the_mean_of_the_directions_of_its_micro_batches():
    rule = jd.regularized(jd.upgrad(), {"entropy": 0.01, "kl": 0.1})
    after, again = by_accelerate("+", rule, True), session()
    policy = again["policy"]
    for pair in (again["batches"][:2], again["batches"][2:]):
        gradients = []
        for tokens in pair:
            losses = again["losses_of"](policy, again["reference"], tokens)
            rows = {
                name: torch.autograd.grad(
                    losses[name], [*policy.parameters()], retain_graph=True, materialize_grads=True
                )
                for name in jd.objective_names(losses)
            }
            jacobian = [torch.stack(parts) for parts in zip(*rows.values(), strict=True)]
            gradients.append(jd.aggregate(rule, jacobian, losses=losses).direction)
        with torch.no_grad():
            for p, one, two in zip(policy.parameters(), *gradients, strict=True):
                p.sub_(0.05 * (one + two))
    check_same(dict(after["policy"].state_dict()), dict(policy.state_dict()))


class TrainerStandIn:
    """What `transformers.Trainer` does with `compute_loss`: the signature is that of version 5."""

    def __init__(self, model, rows):
        self.model, self.rows = model, rows

    def train(self):
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.model.train()
        for tokens in self.rows:
            self.compute_loss(self.model, {"tokens": tokens}, num_items_in_batch=None).backward()
            optimizer.step()
            optimizer.zero_grad()

    def evaluate(self):
        self.model.eval()
        with torch.no_grad():
            loss, outputs = self.compute_loss(self.model, {"tokens": self.rows[0]}, return_outputs=True)
        return {"eval_loss": loss.item(), "outputs": outputs}


def by_trainer(sign, own, folder):
    names = session()
    if own or find_spec("transformers") is None:
        names["transformers"] = SimpleNamespace(Trainer=TrainerStandIn)
        exec(compile(side(sign, "transformers.Trainer"), "diff", "exec"), names)
        trainer = names["PostTraining"](names["policy"], names["batches"])
    else:
        import transformers

        names["transformers"] = transformers
        exec(compile(side(sign, "transformers.Trainer"), "diff", "exec"), names)
        rows = [{"tokens": row} for tokens in names["batches"] for row in tokens]
        quiet = {"use_cpu": True, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
        fixed = {"lr_scheduler_type": "constant", "remove_unused_columns": False, "max_grad_norm": 0}
        size = {"per_device_train_batch_size": 8, "num_train_epochs": 1, "label_names": ["tokens"]}
        settings = transformers.TrainingArguments(output_dir=str(folder), **quiet, **fixed, **size)
        optimizer = torch.optim.SGD(names["policy"].parameters(), lr=0.1)
        trainer = names["PostTraining"](
            names["policy"], settings, train_dataset=rows, eval_dataset=rows[:8], optimizers=(optimizer, None)
        )
        trainer._get_train_sampler = lambda *given: torch.utils.data.SequentialSampler(rows)
    trainer.train()
    return names["policy"].state_dict(), trainer.evaluate()["eval_loss"], trainer


@pytest.mark.parametrize("own", [True, False], ids=["stand-in", "transformers"])
def test_under_fixed_weights_both_sides_for_the_trainer_train_and_evaluate_alike(own, tmp_path):
    (before, loss, _), (after, other, trainer) = (by_trainer(sign, own, tmp_path) for sign in "-+")
    torch.testing.assert_close(after, before)
    assert other == pytest.approx(loss, rel=64 * eps(torch.float32))
    assert trainer.scales.growth_tracker.tolist() == [4] * 4
