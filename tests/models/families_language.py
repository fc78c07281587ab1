"""Language models: attention, experts, state spaces."""

from functools import partial

import torch
from families import SIZES, WORDS, hugging, words
from inputs import library

GROUPED = {**WORDS, **SIZES, "num_key_value_heads": 1, "use_cache": False}

logits = lambda call, x: call(input_ids=x).logits
state = lambda call, x: call(input_ids=x).last_hidden_state
labelled = lambda call, x: call(input_ids=x, labels=x).logits
causal = partial(hugging, predict=logits, x=words())
single = lambda make: lambda: make()._replace(inside=torch.float32)  # norms, routers or scans in float32


def routed(call, x):
    """The loss that balances the experts is in the output."""
    out = call(input_ids=x, labels=x)
    return out.logits * (1 + out.aux_loss)


def t5():
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    return hugging("T5", "T5ForConditionalGeneration", labelled, words(), draws=True, **WORDS, **sizes)


def dora():
    """Adapters with magnitudes of their own, in all projections, beside weights that are trained too."""
    base, peft = t5(), library("peft")
    options = {"r": 2, "target_modules": ["q", "v"], "use_dora": True, "lora_dropout": 0.1, "init_lora_weights": False}

    def make():
        model = peft.get_peft_model(base.make(), peft.LoraConfig(task_type="SEQ_2_SEQ_LM", **options))
        return model.requires_grad_(True)

    return base._replace(make=make)


def mixtral():
    experts = {"num_local_experts": 3, "num_experts_per_tok": 2, "output_router_logits": True}
    experts["experts_implementation"] = "eager"  # the other has no kernel for float64
    return hugging("Mixtral", "MixtralForCausalLM", routed, words(), **GROUPED, **experts)


def xlnet():
    sizes = {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32, "dropout": 0.0}
    return hugging("XLNet", "XLNetModel", state, words(), **WORDS, **sizes)


def deberta():
    relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 8}
    return hugging("DebertaV2", "DebertaV2Model", state, words(), draws=True, **WORDS, **SIZES, **relative)


def gpt2():
    sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, "use_cache": False}
    return causal("GPT2", "GPT2LMHeadModel", draws=True, **WORDS, **sizes)


def bert():
    """Every layer is a checkpoint, and has dropout."""
    base = hugging("Bert", "BertForSequenceClassification", logits, words(), draws=True, vocab_size=32, **SIZES)

    def make():
        module = base.make()
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return module

    return base._replace(make=make)


def lora():
    """Only the adapters are trained."""
    base, peft = gpt2(), library("peft")
    adapters = peft.LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True)
    return base._replace(make=lambda: peft.get_peft_model(base.make(), adapters), trained=lambda name: "lora" in name)


def mamba():
    sizes = {"hidden_size": 8, "state_size": 4, "num_hidden_layers": 2, "use_cache": False}
    return causal("Mamba", "MambaForCausalLM", **WORDS, **sizes)


def recurrent_gemma():
    options = {**GROUPED, "lru_width": 16, "attention_window_size": 4, "conv1d_width": 2, "num_hidden_layers": 3}
    return causal("RecurrentGemma", "RecurrentGemmaForCausalLM", **options)


LANGUAGE = {
    "t5": single(t5),
    "dora": single(dora),
    "mixtral": single(mixtral),
    "xlnet": xlnet,
    "deberta": deberta,
    "bert": bert,
    "gpt2": gpt2,
    "lora": lora,
    "mamba": single(mamba),
    "recurrent_gemma": single(recurrent_gemma),
    "gemma": single(lambda: causal("Gemma2", "Gemma2ForCausalLM", head_dim=8, sliding_window=4, **GROUPED)),
    "qwen": single(lambda: causal("Qwen3", "Qwen3ForCausalLM", head_dim=8, **GROUPED)),
}
