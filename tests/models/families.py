"""What a family of models is, and its losses."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from inputs import library, numbers, tokens
from torch import Tensor, nn

import functional_jd as fj

KEY = fj.random.key(0)

BATCH = 3
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
WORDS = {"vocab_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


class Family(NamedTuple):
    """Models of one kind: small, with random numbers.

    Attributes:
        make: makes the module.
        inputs: the batch, one example in each row.
        predict: `predict(call, inputs) -> [batch, ...]`, where `call` takes what the module takes.
        draws: whether it draws random numbers while it trains.
        inside: the least precise dtype that it computes in.
        trained: which parameters are trained, by name.
    """

    make: Callable[[], nn.Module]
    inputs: Tensor
    predict: Callable[[Callable[..., Any], Tensor], Tensor] = lambda call, x: call(x)
    draws: bool = False
    inside: torch.dtype = torch.float64
    trained: Callable[[str], bool] = lambda name: True

    def module(self) -> nn.Module:
        """In float64, with noise on what starts at zero or one: there gradients vanish or cancel."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            module = self.make()
            with torch.no_grad():
                for p in module.parameters():
                    if p.is_floating_point() and (p == p.flatten()[0]).all():
                        p += 0.1 * torch.randn(p.shape)
        for name, p in module.named_parameters():
            p.requires_grad_(self.trained(name))
        return module.double().train()

    def output(self, call: Callable[..., Any], key: Tensor, x: Tensor) -> Tensor:
        """What the model gives, with the draws of the key."""
        return self.predict(partial(fj.random.keyed(call), key) if self.draws else call, x)

    def losses(self, call: Callable[..., Any], key: Tensor, x: Tensor) -> dict[str, Tensor]:
        """Three losses whose rows are far from parallel."""
        out = self.output(call, key, x)
        out = out.float() if out.dtype.itemsize < 4 else out
        wave = torch.arange(out[0].numel(), dtype=out.dtype).sin().reshape(out[0].shape)
        return {"error": (out - wave).square().mean(), "level": (out * wave).tanh().mean(), "first": out[0].cos().sum()}

    def loss(self, call: Callable[..., Any], x: Tensor) -> Tensor:
        """The loss of one example; all examples have the same draws."""
        return self.output(call, KEY, x[None]).cos().mean()


def vectors(size: int = 5, *further: int) -> Tensor:
    return numbers(BATCH, size, *further)


def words(length: int = 6) -> Tensor:
    return tokens(BATCH, length)


def images(size: int = 16, channels: int = 3) -> Tensor:
    return numbers(BATCH, channels, size, size)


def hugging(name: str, model: str, predict: Any, x: Tensor, draws: bool = False, **options: Any) -> Family:
    """A model of transformers, from the names of its configuration and its class."""
    transformers = library("transformers")
    config = getattr(transformers, f"{name}Config")(**options)
    return Family(lambda: getattr(transformers, model)(config), x, predict, draws)


def timm(name: str, size: int = 32, draws: bool = False, **options: Any) -> Family:
    models = library("timm")
    make = lambda: models.create_model(name, pretrained=False, num_classes=4, **options)
    return Family(make, images(size), draws=draws)
