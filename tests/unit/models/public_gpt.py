"""GPT-like public configs: the keys of their config.json, and what they must be understood as.

What every file carries (`architectures`, dtypes, versions) stands once, in `CARRIED`. Tied parameters count once.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Public(NamedTuple):
    """A published config, `ModelConfig` in words, and the parameters of the whole model."""

    config: dict[str, Any]
    meaning: str
    parameters: int


CARRIED: dict[str, Any] = {
    "_name_or_path": "./checkpoint", "architectures": ["AnyForCausalLM"], "initializer_range": 0.02,
    "torch_dtype": "float16", "transformers_version": "4.28.1", "use_cache": True,
}  # fmt: skip


def size(width: int, ffn: int, layers: int, heads: int, kv_heads: int | None = None) -> dict[str, Any]:
    """The five sizes in the keys of Llama's descendants."""
    keys = {"hidden_size": width, "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads}
    return keys if kv_heads is None else keys | {"num_key_value_heads": kv_heads}


_GPT2: dict[str, Any] = {
    "model_type": "gpt2", "activation_function": "gelu_new", "attn_pdrop": 0.1, "bos_token_id": 50256,
    "embd_pdrop": 0.1, "eos_token_id": 50256, "layer_norm_epsilon": 1e-05, "n_ctx": 1024, "n_positions": 1024,
    "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
    "summary_type": "cls_index", "summary_use_proj": True, "vocab_size": 50257,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
}  # fmt: skip
_BIGCODE: dict[str, Any] = {
    "model_type": "gpt_bigcode", "activation_function": "gelu", "attention_softmax_in_fp32": True, "attn_pdrop": 0.1,
    "bos_token_id": 0, "embd_pdrop": 0.1, "eos_token_id": 0, "inference_runner": 0, "layer_norm_epsilon": 1e-05,
    "max_batch_size": None, "max_sequence_length": None, "multi_query": True, "n_positions": 8192,
    "pad_key_length": True, "pre_allocate_kv_cache": False, "resid_pdrop": 0.1,
    "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True, "summary_activation": None,
    "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index",
    "summary_use_proj": True, "validate_runner_input": True, "vocab_size": 49152,
}  # fmt: skip
_SMALL_STARCODER: dict[str, Any] = _BIGCODE | {"activation_function": "gelu_pytorch_tanh"}
_STARCODER: dict[str, Any] = _BIGCODE | {"n_embd": 6144, "n_head": 48, "n_inner": 24576, "n_layer": 40}
_FALCON: dict[str, Any] = {
    "model_type": "falcon", "alibi": False, "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0,
    "bias": False, "bos_token_id": 11, "eos_token_id": 11, "hidden_dropout": 0.0, "layer_norm_epsilon": 1e-05,
    "auto_map": {"AutoConfig": "configuration_falcon.FalconConfig"}, "vocab_size": 65024,
}  # fmt: skip
_RW: dict[str, Any] = _FALCON | {"auto_map": {"AutoConfig": "configuration_RW.RWConfig"}}
_NEOX: dict[str, Any] = {
    "model_type": "gpt_neox", "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu", "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048, "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False,
    "use_parallel_residual": True, "vocab_size": 50304,
}  # fmt: skip


def _gpt2(width: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return _GPT2 | {"n_embd": width, "n_layer": layers, "n_head": heads} | more


def _bigcode(base: dict[str, Any], width: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return base | {"n_embd": width, "n_layer": layers, "n_head": heads, "n_inner": 4 * width} | more


GPT: dict[str, Public] = {
    "bigcode/santacoder": Public(
        _gpt2(
            2048, 24, 16, activation_function="gelu_fast", attention_head_type="multiquery", n_inner=8192,
            auto_map={"AutoConfig": "configuration_gpt2_mq.GPT2CustomConfig"}, bos_token_id=49152, eos_token_id=49152,
            n_positions=2048, reorder_and_upcast_attn=False, scale_attn_by_inverse_layer_idx=False,
            scale_attn_weights=True, vocab_size=49280,
        ),
        "16/1 x 128, ffn 8192, learned 2048, gelu_tanh, tied, bias qkv out mlp, eos 49152", 1_124_886_528,
    ),
    "bigcode/gpt_bigcode-santacoder": Public(
        _bigcode(
            _SMALL_STARCODER, 2048, 24, 16, n_positions=2048, bos_token_id=49152, eos_token_id=49152, vocab_size=49280
        ),
        "16/1 x 128, ffn 8192, learned 2048, gelu_tanh, tied, bias qkv out mlp, eos 49152", 1_124_886_528,
    ),
    "bigcode/starcoder": Public(
        _STARCODER, "48/1 x 128, ffn 24576, learned 8192, gelu, tied, bias qkv out mlp, eos 0", 15_517_456_384
    ),
    "WizardLM/WizardCoder-15B-V1.0": Public(
        _STARCODER | {"vocab_size": 49153, "pad_token_id": 49152},
        "48/1 x 128, ffn 24576, learned 8192, gelu, tied, bias qkv out mlp, eos 0", 15_517_462_528,
    ),
    "HuggingFaceH4/starchat-beta": Public(
        _STARCODER | {"vocab_size": 49156, "use_cache": False},
        "48/1 x 128, ffn 24576, learned 8192, gelu, tied, bias qkv out mlp, eos 0", 15_517_480_960,
    ),
    "bigcode/starcoderbase-1b": Public(
        _bigcode(_SMALL_STARCODER, 2048, 24, 16),
        "16/1 x 128, ffn 8192, learned 8192, gelu_tanh, tied, bias qkv out mlp, eos 0", 1_137_207_296,
    ),
    "bigcode/starcoderbase-3b": Public(
        _bigcode(_SMALL_STARCODER, 2816, 36, 22),
        "22/1 x 128, ffn 11264, learned 8192, gelu_tanh, tied, bias qkv out mlp, eos 0", 3_043_311_104,
    ),
    "bigcode/starcoderbase-7b": Public(
        _bigcode(_SMALL_STARCODER, 4096, 42, 32),
        "32/1 x 128, ffn 16384, learned 8192, gelu_tanh, tied, bias qkv out mlp, eos 0", 7_327_263_232,
    ),
    "bigcode/tiny_starcoder_py": Public(
        _bigcode(_SMALL_STARCODER, 768, 20, 12),
        "12/1 x 64, ffn 3072, learned 8192, gelu_tanh, tied, bias qkv out mlp, eos 0", 164_144_128,
    ),
    "ibm-granite/granite-20b-code-base": Public(
        _bigcode(_SMALL_STARCODER, 6144, 52, 48),
        "48/1 x 128, ffn 24576, learned 8192, gelu_tanh, tied, bias qkv out mlp, eos 0", 20_066_993_152,
    ),
    "ibm-granite/granite-34b-code-base": Public(
        _bigcode(_SMALL_STARCODER, 6144, 88, 48),
        "48/1 x 128, ffn 24576, learned 8192, gelu_tanh, tied, bias qkv out mlp, eos 0", 33_715_603_456,
    ),
    "openai-community/gpt2": Public(
        _gpt2(768, 12, 12),
        "12/12 x 64, ffn 3072, learned 1024, gelu_tanh, tied, bias qkv out mlp, eos 50256", 124_439_808,
    ),
    "openai-community/gpt2-medium": Public(
        _gpt2(1024, 24, 16, n_special=0, predict_special_tokens=True),
        "16/16 x 64, ffn 4096, learned 1024, gelu_tanh, tied, bias qkv out mlp, eos 50256", 354_823_168,
    ),
    "openai-community/gpt2-large": Public(
        _gpt2(1280, 36, 20),
        "20/20 x 64, ffn 5120, learned 1024, gelu_tanh, tied, bias qkv out mlp, eos 50256", 774_030_080,
    ),
    "openai-community/gpt2-xl": Public(
        _gpt2(1600, 48, 25, output_past=True),
        "25/25 x 64, ffn 6400, learned 1024, gelu_tanh, tied, bias qkv out mlp, eos 50256", 1_557_611_200,
    ),
    "distilbert/distilgpt2": Public(
        _gpt2(768, 6, 12, _num_labels=1, id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0}),
        "12/12 x 64, ffn 3072, learned 1024, gelu_tanh, tied, bias qkv out mlp, eos 50256", 81_912_576,
    ),
    "EleutherAI/pythia-70m": Public(
        _NEOX | size(512, 2048, 6, 8),
        "8/8 x 64, ffn 2048, rope 10000 on 16, gelu, untied, bias qkv out mlp, parallel, eos 0", 70_426_624,
    ),
    "EleutherAI/pythia-2.8b": Public(
        _NEOX | size(2560, 10240, 32, 32),
        "32/32 x 80, ffn 10240, rope 10000 on 20, gelu, untied, bias qkv out mlp, parallel, eos 0", 2_775_208_960,
    ),
    "EleutherAI/gpt-neox-20b": Public(
        {k: v for k, v in _NEOX.items() if k != "use_parallel_residual"} | size(6144, 24576, 44, 64)
        | {"attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0, "hidden_act": "gelu_fast", "vocab_size": 50432},
        "64/64 x 96, ffn 24576, rope 10000 on 24, gelu_tanh, untied, bias qkv out mlp, parallel, eos 0", 20_554_567_680,
    ),
    "databricks/dolly-v2-3b": Public(
        _NEOX | size(2560, 10240, 32, 32)
        | {"custom_pipelines": {"text-generation": {"impl": "instruct_pipeline.X"}}, "vocab_size": 50280},
        "32/32 x 80, ffn 10240, rope 10000 on 20, gelu, untied, bias qkv out mlp, parallel, eos 0", 2_775_086_080,
    ),
    "tiiuae/falcon-7b": Public(
        _FALCON | {
            "hidden_size": 4544, "multi_query": True, "new_decoder_architecture": False, "num_attention_heads": 71,
            "num_hidden_layers": 32, "parallel_attn": True,
        },
        "71/1 x 64, ffn 18176, rope 10000, gelu, tied, parallel on one norm, eos 11", 6_921_720_704,
    ),
    "tiiuae/falcon-40b": Public(
        _FALCON | {
            "hidden_size": 8192, "new_decoder_architecture": True, "num_attention_heads": 128, "num_hidden_layers": 60,
            "num_kv_heads": 8, "parallel_attn": True,
        },
        "128/8 x 64, ffn 32768, rope 10000, gelu, tied, parallel, eos 11", 41_303_293_952,
    ),
    "tiiuae/falcon-40b, saved by transformers 4.33": Public(
        _FALCON | {
            "hidden_size": 8192, "multi_query": True, "n_head": 128, "n_layer": 60, "new_decoder_architecture": True,
            "num_attention_heads": 128, "num_hidden_layers": 60, "num_kv_heads": 8, "parallel_attn": True,
        },
        "128/8 x 64, ffn 32768, rope 10000, gelu, tied, parallel, eos 11", 41_303_293_952,
    ),
    "tiiuae/falcon-rw-1b": Public(
        _FALCON | {
            "alibi": True, "bias": True, "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 2048,
            "multi_query": False, "new_decoder_architecture": False, "num_attention_heads": 32,
            "num_hidden_layers": 24, "parallel_attn": False, "vocab_size": 50304,
        },
        "32/32 x 64, ffn 8192, alibi, gelu, tied, bias qkv out mlp, eos 2", 1_311_625_216,
    ),
    "tiiuae/falcon-11B": Public(
        _FALCON | {
            "activation": "gelu", "ff_factor": 4, "ffn_hidden_size": 16384, "hidden_size": 4096, "multi_query": True,
            "max_position_embeddings": 8192, "new_decoder_architecture": True, "num_attention_heads": 32,
            "num_hidden_layers": 60, "num_kv_heads": 8, "num_ln_in_parallel_attn": 1, "parallel_attn": True,
            "rope_scaling": None, "rope_theta": 5000042, "tie_word_embeddings": False,
        },
        "32/8 x 128, ffn 16384, rope 5000042, gelu, untied, parallel on one norm, eos 11", 11_102_822_400,
    ),
    "tiiuae/falcon-7b, May 2023": Public(
        _RW | {
            "model_type": "RefinedWebModel", "hidden_size": 4544, "multi_query": True, "n_head": 71, "n_layer": 32,
            "parallel_attn": True,
        },
        "71/1 x 64, ffn 18176, rope 10000, gelu, tied, parallel on one norm, eos 11", 6_921_720_704,
    ),
    "tiiuae/falcon-40b, May 2023": Public(
        _RW | {
            "model_type": "RefinedWeb", "hidden_size": 8192, "n_head": 128, "n_head_kv": 8, "n_layer": 60,
            "parallel_attn": True,
        },
        "128/8 x 64, ffn 32768, rope 10000, gelu, tied, parallel, eos 11", 41_303_293_952,
    ),
    "tiiuae/falcon-rw-1b, May 2023": Public(
        _RW | {
            "model_type": "RefinedWebModel", "alibi": True, "bias": True, "bos_token_id": 1, "eos_token_id": 2,
            "hidden_size": 2048, "multi_query": False, "n_head": 32, "n_layer": 24, "parallel_attn": False,
            "vocab_size": 50304,
        },
        "32/32 x 64, ffn 8192, alibi, gelu, tied, bias qkv out mlp, eos 2", 1_311_625_216,
    ),
}  # fmt: skip
