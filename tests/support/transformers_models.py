"""Small models of transformers of random weights, and the same ones with other attention beside them."""

from __future__ import annotations

import copy

import pytest
import torch

from flash_cute import reference
from support.tolerance import assert_within_rule

transformers = pytest.importorskip("transformers", minversion="5", reason="needs transformers 5")
DTYPE = torch.bfloat16
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
ENCODER = SIZES | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SIDE = {"layers": 1, "attention_heads": 4, "ffn_dim": 96}
BOTH = {"d_model": 64, "dropout": 0.0, "decoder_start_token_id": 1, "forced_eos_token_id": None}
BOTH |= {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in SIDE.items()}
BOTH |= {name: SIZES[name] for name in ("vocab_size", "max_position_embeddings", "pad_token_id")}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
WINDOWED = GROUPED | {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1}
# As many are taken as there are, so that rounding does not choose others.
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2, "experts_implementation": "eager"}
# A cap that scores reach.
GEMMA2 = GROUPED | {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 6}
GEMMA2 |= {"attn_logit_softcapping": 0.05, "initializer_range": 0.1}
MODELS = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", SIZES | GPT2),
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "qwen": ("Qwen3ForCausalLM", "Qwen3Config", GROUPED | {"head_dim": 16}),
    "mistral": ("MistralForCausalLM", "MistralConfig", GROUPED | {"sliding_window": 6}),
    "one layer of two with a window": ("Qwen2ForCausalLM", "Qwen2Config", WINDOWED),
    "sinks": ("GptOssForCausalLM", "GptOssConfig", GROUPED | EXPERTS | {"head_dim": 16, "sliding_window": 6}),
    "softcap": ("Gemma2ForCausalLM", "Gemma2Config", GEMMA2),
    "bert": ("BertForMaskedLM", "BertConfig", ENCODER),
    "bart": ("BartForConditionalGeneration", "BartConfig", BOTH),
}
# Whose values are narrower than queries and keys.
LATENT = SIZES | {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
LATENT |= {"v_head_dim": 16, "num_key_value_heads": 4}
ROUTED = {"n_routed_experts": 2, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
ROUTED |= {"moe_intermediate_size": 32, "experts_implementation": "eager"}
NARROW_SINKS = {"head_dim": 24, "v_head_dim": 16, "sliding_window": 6}
NARROW_SINKS |= {"layer_types": ["sliding_attention", "full_attention"]}
NARROW = {
    "DeepSeek V3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", LATENT | ROUTED),
    "MiniCPM3": ("MiniCPM3ForCausalLM", "MiniCPM3Config", LATENT),
    "MiMo V2 Flash": ("MiMoV2FlashForCausalLM", "MiMoV2FlashConfig", GROUPED | ROUTED | NARROW_SINKS),
}
ORACLES = {"sinks": "eager", "MiMo V2 Flash": "eager", "softcap": "reference"}  # else SDPA, which has neither
# With biases of positions, which train.
T5 = {"vocab_size": 64, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
T5 |= {"decoder_start_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "dropout_rate": 0.0}
# Of weights so large that biases change logits by more than rounding does, and of more than a few logits, of
# which errors would be chance.
LARGE = {"initializer_range": 0.1, "num_labels": 32}
BEIT = LARGE | {"layer_scale_init_value": 1.0}
BEIT |= {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
BEIT |= {"image_size": 32, "patch_size": 8, "drop_path_rate": 0.0}
SWIN = LARGE | {"image_size": 32, "patch_size": 2, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4]}
SWIN |= {"window_size": 4, "drop_path_rate": 0.0}  # 4 of 16 and 2 of 8 patches, each second layer's shifted
BIASED = {
    "T5": ("T5ForConditionalGeneration", "T5Config", T5),
    "Swin": ("SwinForImageClassification", "SwinConfig", SWIN),
    "BEiT": ("BeitForImageClassification", "BeitConfig", BEIT | {"use_relative_position_bias": True}),
    "BEiT, shared": (
        "BeitForImageClassification",
        "BeitConfig",
        BEIT | {"use_shared_relative_position_bias": True},
    ),
}
BATCH, LENGTH = 3, 20


def of_reference(module, query, key, value, attention_mask, scaling=None, softcap=None, **options):
    """Attention in the type of its inputs, where eager attention's softmax is always in float32."""
    whole = attention_mask is None and query.shape[2] > 1  # a query alone stands at the last key
    mask = {"causal": whole and module.is_causal, "mask": attention_mask, "softcap": softcap or 0.0}
    out = reference.forward(query, key, value, softmax_scale=scaling, dtype=query.dtype, **mask)[0]
    return out.transpose(1, 2), None


transformers.AttentionInterface.register("reference", of_reference)
transformers.AttentionMaskInterface.register("reference", transformers.masking_utils.sdpa_mask)


def build(name: str, device) -> torch.nn.Module:
    """The model in float32 on the CPU's random weights, so that they are the same on every device."""
    model_class, config_class, sizes = (MODELS | NARROW | BIASED)[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**sizes)
    model = getattr(transformers, model_class)._from_config(config, attn_implementation="eager")
    for parameter, value in model.named_parameters():
        if "position_bias_table" in parameter or "relative_attention_bias" in parameter:
            torch.nn.init.normal_(value)  # else zeros
    return model.to(device)


class Trio:
    """A model with our attention and with eager attention in bfloat16, and with SDPA in float64."""

    def __init__(self, name: str, device):
        rounded = build(name, device).to(DTYPE).eval()
        self.yardstick, self.oracle = rounded, copy.deepcopy(rounded).double()
        self.ours = copy.deepcopy(rounded)
        self.ours.set_attn_implementation("cute_attention")
        self.oracle.set_attn_implementation(ORACLES.get(name, "sdpa"))
        self.all = self.ours, self.yardstick, self.oracle


def tokens(device, batch: int = BATCH, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(1, SIZES["vocab_size"], (batch, length), device=device)


def padding(kind: str, device, length: int = LENGTH) -> torch.Tensor | None:
    if kind == "none":
        return None
    mask = torch.ones(BATCH, length, dtype=torch.long, device=device)
    if kind in ("left", "both"):
        mask[0, :7] = 0
        mask[2, : length - 1] = 0
    if kind in ("right", "both"):
        mask[1, length - 4 :] = 0
    return mask


def assert_logits(trio: Trio, inputs: dict, present: torch.Tensor | None = None) -> None:
    """present: bool (batch, length), the tokens to compare."""
    ours, yardstick, oracle = (model(**inputs).logits.detach() for model in trio.all)
    if present is not None:
        ours, yardstick, oracle = (logits[present] for logits in (ours, yardstick, oracle))
    assert ours.isfinite().all()
    assert_within_rule("logits", ours, yardstick, oracle)


HOLES = torch.tensor([[1, 1, 0, 1, 1, 1], [0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
MAKE = transformers.masking_utils


def as_trio(model: torch.nn.Module, device) -> Trio:
    trio = Trio.__new__(Trio)
    trio.yardstick = model.to(device, DTYPE).eval()
    trio.oracle, trio.ours = copy.deepcopy(trio.yardstick).double(), copy.deepcopy(trio.yardstick)
    trio.ours.set_attn_implementation("cute_attention")
    trio.oracle.set_attn_implementation("sdpa")
    trio.all = trio.ours, trio.yardstick, trio.oracle
    return trio


class Chosen(transformers.LogitsProcessor):
    """Makes generate() choose given tokens."""

    def __init__(self, sequences: torch.Tensor):
        self.sequences = sequences

    def __call__(self, ids, scores):
        return torch.full_like(scores, -1e9).scatter(1, self.sequences[:, ids.shape[1], None], 0.0)


def assert_generated(trio: Trio, cache: str | None, **inputs) -> None:
    """The logits of each step, along the tokens that our model chooses."""
    results = []
    for model in trio.all:
        options = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        if results:
            options["logits_processor"] = transformers.LogitsProcessorList([Chosen(results[0].sequences)])
        elif cache:
            options |= {"cache_implementation": cache, "disable_compile": True}
        results.append(model.generate(**inputs, max_new_tokens=9, **options))
    assert_within_rule("logits", *(torch.stack(result.logits, 1) for result in results))
