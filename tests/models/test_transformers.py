"""Transformers as their library has them, beside an ordinary loop: dropout, checkpoints, parameters that are frozen."""

import pytest
import torch
from bounds import check_same
from families import SIZES
from inputs import classes, library, numbers, tokens
from plain_loops import ADAMW, N_STEPS, SGD, Problem, by_rule, check_trains_alike
from torch.nn.functional import cross_entropy, mse_loss

import functional_jd as fj

pytestmark = [
    pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]


def bert(dropout=0.1, checkpoints=True):
    transformers = library("transformers")
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    config = transformers.BertConfig(vocab_size=32, num_labels=4, **SIZES, **rates)

    def make():
        module = transformers.BertForSequenceClassification(config)
        if checkpoints:
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return module

    def losses(net, ids, label, size):
        logits = net(ids).logits
        return {"class": cross_entropy(logits[:, :3], label), "size": mse_loss(logits[:, 3], size)}

    batches = zip(tokens(N_STEPS, 4, 8), classes(N_STEPS, 4, 3), numbers(N_STEPS, 4), strict=True)
    return Problem(make, losses, list(batches), draws=dropout > 0)


@pytest.mark.parametrize("optimizers", [SGD, ADAMW], ids=["sgd", "adamw"])
def test_bert_with_dropout_and_checkpoints_trains_as_an_ordinary_loop(optimizers):
    check_trains_alike(bert(), optimizers)


@pytest.mark.parametrize("engine", ["jacobian", "gramian"])
def test_bert_trains_by_rows_as_rows_of_an_ordinary_loop(engine):
    check_trains_alike(bert(), SGD, fj.upgrad(), by_rule(fj.upgrad()), engine=engine)


@pytest.mark.slow
def test_bert_compiled_trains_as_an_ordinary_loop():
    """As far as torch compiles it: BERT asks for a method's signature, which is traced for the module itself only."""
    check_trains_alike(bert(dropout=0.0, checkpoints=False), ADAMW, compiled=True, in_place_of_the_module=True)


def gpt2_with_lora(dropout=0.1):
    transformers, peft = library("transformers"), library("peft")
    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False, pad_token_id=0, **rates
    )
    adapters = peft.LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=dropout, fan_in_fan_out=True)

    def make():
        return peft.get_peft_model(transformers.GPT2LMHeadModel(config), adapters)

    def losses(net, ids):
        logits = net(ids).logits
        next_token = cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        return {"next": next_token, "confidence": 1e-3 * logits.logsumexp(-1).square().mean()}

    batches = [(ids,) for ids in tokens(N_STEPS, 4, 8)]
    return Problem(make, losses, batches, trained=lambda name, p: "lora" in name, draws=dropout > 0)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
def test_gpt2_with_lora_trains_as_an_ordinary_loop(compiled):
    state = check_trains_alike(gpt2_with_lora(), ADAMW, compiled=compiled)
    assert all("lora" in name for name in state.params)


@pytest.mark.parametrize("engine", ["jacobian", "gramian"])
def test_gpt2_with_lora_trains_by_rows_as_rows_of_an_ordinary_loop(engine):
    check_trains_alike(gpt2_with_lora(), SGD, fj.upgrad(), by_rule(fj.upgrad()), engine=engine)


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
        return torch.zeros(1, 1, T, T).masked_fill(hidden, torch.finfo(torch.float32).min)

    return module.eval(), mask


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_padded_texts_go_the_fast_way_with_the_mask_that_attention_adds(family, attention):
    module, mask = padded(family, attention)
    params, call = dict(module.named_parameters()), fj.functional(module)
    ids = tokens(1, 4, 8)[0].clamp(min=1) * (torch.arange(8) < torch.tensor([[3], [8], [5], [6]]))

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
