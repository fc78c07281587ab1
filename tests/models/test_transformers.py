"""Texts with padding, as their library's models have them, beside an ordinary loop."""

import pytest
import torch
from bounds import check_same
from families import SIZES
from inputs import library, tokens

import functional_jd as fj


def padded(family, attention):
    """A model in evaluation mode, and the mask of tokens that are not padding, or come later, as it is added."""
    transformers = library("transformers")
    torch.manual_seed(1)
    common = {"vocab_size": 32, "attn_implementation": attention, "initializer_range": 0.5, "pad_token_id": 0}
    if family == "bert":
        module = transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, **common))
    else:
        sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 1}
        module = transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False, **sizes, **common))

    def mask(t):
        T = len(t)
        hidden = (t == 0) if family == "bert" else (t == 0) | torch.ones(T, T).triu(1).bool()
        return torch.zeros(1, 1, T, T).double().masked_fill(hidden, torch.finfo(torch.float64).min)

    return module.double().eval(), mask


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_padded_texts_go_the_fast_way_with_the_mask_that_attention_adds(family, attention):
    module, mask = padded(family, attention)
    params, call = dict(module.named_parameters()), fj.functional(module)
    ids = tokens(4, 8).clamp(min=1) * (torch.arange(8) < torch.tensor([[3], [8], [5], [6]]))

    def loss(params, t):
        output, _ = call(params, dict(module.named_buffers()), input_ids=t[None], attention_mask=mask(t))
        return output.logits.square().mean()

    squares, values, _ = fj.squared_norms_fn(fj.per_example(loss))(params, ids)  # no warning: warnings are errors
    for t, square, value in zip(ids, squares, values, strict=True):
        plain = module(input_ids=t[None], attention_mask=(t != 0)[None].long()).logits.square().mean()
        gradients = torch.autograd.grad(plain, list(params.values()), allow_unused=True)
        check_same(value, plain.detach())
        total = sum(g.double().square().sum() for g in gradients if g is not None)
        check_same(square, total)
