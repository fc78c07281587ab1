"""What a family of models is, and its losses."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from inputs import library, numbers, tokens
from torch import Tensor, nn

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
    """

    make: Callable[[], nn.Module]
    inputs: Tensor
    predict: Callable[[Callable[..., Any], Tensor], Tensor] = lambda call, x: call(x)
    draws: bool = False
    inside: torch.dtype = torch.float64

    def losses(self, call: Callable[..., Any], x: Tensor) -> dict[str, Tensor]:
        """Three losses whose rows are far from parallel."""
        out = self.predict(call, x)
        out = out.float() if out.dtype.itemsize < 4 else out
        wave = torch.arange(out[0].numel(), dtype=out.dtype).sin().reshape(out[0].shape)
        return {
            "error": (out - wave).square().mean(),
            "level": (out * wave).tanh().mean(),
            "first": out[0].cos().sum(),
        }

    def loss(self, call: Callable[..., Any], x: Tensor) -> Tensor:
        """The loss of one example."""
        return self.predict(call, x[None]).cos().mean()


def vectors(size: int = 5, *further: int) -> Tensor:
    return numbers(1, BATCH, size, *further)[0]


def words(length: int = 6) -> Tensor:
    return tokens(1, BATCH, length)[0]


def images(size: int = 16, channels: int = 3) -> Tensor:
    return numbers(1, BATCH, channels, size, size)[0]


def hugging(name: str, model: str, predict: Any, x: Tensor, draws: bool = False, **options: Any) -> Family:
    """A model of transformers, from the names of its configuration and its class."""
    transformers = library("transformers")
    config = getattr(transformers, f"{name}Config")(**options)
    return Family(lambda: getattr(transformers, model)(config), x, predict, draws)


def timm(name: str, size: int = 32, draws: bool = False, **options: Any) -> Family:
    models = library("timm")
    make = lambda: models.create_model(name, pretrained=False, num_classes=4, **options)
    return Family(make, images(size), draws=draws)
