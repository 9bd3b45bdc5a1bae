"""Llama-like public configs: as public_gpt, for everything that has Llama's keys."""

from __future__ import annotations

from typing import Any

from tests.unit.models.public_gpt import Public, size

_STARCODER2: dict[str, Any] = {
    "model_type": "starcoder2", "attention_dropout": 0.1, "residual_dropout": 0.1, "embedding_dropout": 0.1,
    "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 16384,
    "mlp_type": "default", "norm_epsilon": 1e-05, "sliding_window": 4096, "use_bias": True, "vocab_size": 49152,
}  # fmt: skip
_LLAMA: dict[str, Any] = {
    "model_type": "llama", "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 11008, "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "tie_word_embeddings": False, "vocab_size": 32000,
}  # fmt: skip
_LLAMA3: dict[str, Any] = _LLAMA | {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000, "eos_token_id": 128001,
    "intermediate_size": 14336, "max_position_embeddings": 8192, "num_key_value_heads": 8, "rope_theta": 500000.0,
    "vocab_size": 128256,
}  # fmt: skip
_LLAMA31: dict[str, Any] = _LLAMA3 | {
    "max_position_embeddings": 131072, "mlp_bias": False,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}  # fmt: skip
_GRANITE_CODE: dict[str, Any] = _LLAMA | {
    "attention_bias": True, "attention_dropout": 0.1, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
    "mlp_bias": True, "rope_theta": 10000, "tie_word_embeddings": True, "vocab_size": 49152,
}  # fmt: skip
_DEEPSEEK: dict[str, Any] = _LLAMA | {
    "bos_token_id": 32013, "eos_token_id": 32014, "max_position_embeddings": 16384, "rms_norm_eps": 1e-06,
    "rope_scaling": {"factor": 4.0, "type": "linear"}, "rope_theta": 100000, "vocab_size": 32256,
}  # fmt: skip
_SMOLLM2: dict[str, Any] = _LLAMA | {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 0, "hidden_size": 576,
    "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "num_attention_heads": 9,
    "num_hidden_layers": 30, "num_key_value_heads": 3, "rope_interleaved": False, "rope_theta": 100000,
    "tie_word_embeddings": True, "vocab_size": 49152,
}  # fmt: skip
_MISTRAL: dict[str, Any] = {
    "model_type": "mistral", "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
    "tie_word_embeddings": False, "vocab_size": 32000,
}  # fmt: skip
_QWEN2: dict[str, Any] = {
    "model_type": "qwen2", "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
    "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
_QWEN3: dict[str, Any] = {
    "model_type": "qwen3", "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 40960,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
_GRANITE: dict[str, Any] = {
    "model_type": "granite", "attention_bias": False, "attention_dropout": 0.1, "bos_token_id": 0,
    "embedding_multiplier": 12.0, "eos_token_id": 0, "hidden_act": "silu", "mlp_bias": False,
    "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "pad_token_id": 0,
    "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None, "tie_word_embeddings": True,
    "vocab_size": 49155,
}  # fmt: skip
_GEMMA: dict[str, Any] = {
    "model_type": "gemma", "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2, "eos_token_id": 1,
    "head_dim": 256, "hidden_size": 2048, "intermediate_size": 16384, "max_position_embeddings": 8192,
    "num_attention_heads": 8, "num_hidden_layers": 18, "num_key_value_heads": 1, "pad_token_id": 0,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000.0, "vocab_size": 256000,
}  # fmt: skip


def _llama32(width: int, ffn: int, layers: int, heads: int, head_dim: int) -> dict[str, Any]:
    scaling = _LLAMA31["rope_scaling"] | {"factor": 32.0}
    more = {"head_dim": head_dim, "rope_scaling": scaling, "tie_word_embeddings": True}
    return _LLAMA31 | size(width, ffn, layers, heads, 8) | more


def _qwen2(width: int, ffn: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return _QWEN2 | size(width, ffn, layers, heads, kv_heads) | {"max_window_layers": layers}


LLAMA: dict[str, Public] = {
    "bigcode/starcoder2-3b": Public(
        _STARCODER2 | size(3072, 12288, 30, 24, 2) | {"rope_theta": 999999.4420358813},
        "24/2 x 128, ffn 12288, rope 999999.4420358813, gelu_tanh, tied, window 4096, bias qkv out mlp, eos 0",
        3_030_371_328,
    ),
    "bigcode/starcoder2-7b": Public(
        _STARCODER2 | size(4608, 18432, 32, 36, 4) | {"rope_theta": 1000000},
        "36/4 x 128, ffn 18432, rope 1000000, gelu_tanh, tied, window 4096, bias qkv out mlp, eos 0", 7_173_923_840,
    ),
    "bigcode/starcoder2-15b": Public(
        _STARCODER2 | size(6144, 24576, 40, 48, 4) | {"rope_theta": 100000},
        "48/4 x 128, ffn 24576, rope 100000, gelu_tanh, tied, window 4096, bias qkv out mlp, eos 0", 15_655_899_136,
    ),
    "meta-llama/Llama-2-7b-hf": Public(
        _LLAMA, "32/32 x 128, gated ffn 11008, rope 10000, silu, untied, eos 2", 6_738_415_616
    ),
    "codellama/CodeLlama-7b-hf": Public(
        _LLAMA | {"max_position_embeddings": 16384, "rope_theta": 1000000, "vocab_size": 32016},
        "32/32 x 128, gated ffn 11008, rope 1000000, silu, untied, eos 2", 6_738_546_688,
    ),
    "codellama/CodeLlama-34b-hf": Public(
        _LLAMA | size(8192, 22016, 48, 64, 8) | {"max_position_embeddings": 16384, "rope_theta": 1000000},
        "64/8 x 128, gated ffn 22016, rope 1000000, silu, untied, eos 2", 33_743_970_304,
    ),
    "meta-llama/Meta-Llama-3-8B": Public(
        _LLAMA3, "32/8 x 128, gated ffn 14336, rope 500000, silu, untied, eos 128001", 8_030_261_248
    ),
    "meta-llama/Llama-3.1-8B-Instruct": Public(
        _LLAMA31 | {"eos_token_id": [128001, 128008, 128009]},
        "32/8 x 128, gated ffn 14336, rope 500000 llama3 8, silu, untied, eos 128001 128008 128009", 8_030_261_248,
    ),
    "meta-llama/Llama-3.2-1B": Public(
        _llama32(2048, 8192, 16, 32, 64),
        "32/8 x 64, gated ffn 8192, rope 500000 llama3 32, silu, tied, eos 128001", 1_235_814_400,
    ),
    "unsloth/Llama-3.2-3B": Public(
        _llama32(3072, 8192, 28, 24, 128)
        | {"pad_token_id": 128004, "unsloth_fixed": True, "unsloth_version": "2024.9"},
        "24/8 x 128, gated ffn 8192, rope 500000 llama3 32, silu, tied, eos 128001", 3_212_749_824,
    ),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": Public(
        _LLAMA | size(2048, 5632, 22, 32, 4) | {"attention_bias": False, "max_position_embeddings": 2048},
        "32/4 x 64, gated ffn 5632, rope 10000, silu, untied, eos 2", 1_100_048_384,
    ),
    "HuggingFaceTB/SmolLM2-135M": Public(
        _SMOLLM2, "9/3 x 64, gated ffn 1536, rope 100000, silu, tied, eos 0", 134_515_008
    ),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": Public(
        _SMOLLM2 | size(2048, 8192, 24, 32, 32) | {
            "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "rope_theta": 130000,
            "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        },
        "32/32 x 64, gated ffn 8192, rope 130000, silu, tied, eos 2", 1_711_376_384,
    ),
    "deepseek-ai/deepseek-coder-1.3b-base": Public(
        _DEEPSEEK | size(2048, 5504, 24, 16, 16),
        "16/16 x 128, gated ffn 5504, rope 100000 linear 4, silu, untied, eos 32014", 1_346_471_936,
    ),
    "deepseek-ai/deepseek-coder-6.7b-base": Public(
        _DEEPSEEK, "32/32 x 128, gated ffn 11008, rope 100000 linear 4, silu, untied, eos 32014", 6_740_512_768
    ),
    "01-ai/Yi-Coder-9B-Chat": Public(
        _LLAMA | size(4096, 11008, 48, 32, 4)
        | {"eos_token_id": 7, "max_position_embeddings": 131072, "rope_theta": 10000000, "vocab_size": 64000},
        "32/4 x 128, gated ffn 11008, rope 10000000, silu, untied, eos 7", 8_829_407_232,
    ),
    "ibm-granite/granite-3b-code-base": Public(
        _GRANITE_CODE | size(2560, 10240, 32, 32, 32) | {"max_position_embeddings": 2048},
        "32/32 x 80, gated ffn 10240, rope 10000, silu, tied, bias qkv out mlp, eos 0", 3_482_503_680,
    ),
    "ibm-granite/granite-8b-code-base": Public(
        _GRANITE_CODE | size(4096, 14336, 36, 32, 8),
        "32/8 x 128, gated ffn 14336, rope 10000, silu, tied, bias qkv out mlp, eos 0", 8_054_910_976,
    ),
    "ibm-granite/granite-3.0-2b-base": Public(
        _GRANITE | {
            "attention_multiplier": 0.015625, "hidden_size": 2048, "intermediate_size": 8192, "logits_scaling": 8.0,
            "max_position_embeddings": 4096, "rope_theta": 10000.0,
        },
        "32/8 x 64, gated ffn 8192, rope 10000, silu, tied, scaled 12 0.22 8 0.015625, eos 0", 2_533_531_648,
    ),
    "ibm-granite/granite-3.1-8b-instruct": Public(
        _GRANITE | {
            "attention_multiplier": 0.0078125, "hidden_size": 4096, "intermediate_size": 12800, "logits_scaling": 16.0,
            "max_position_embeddings": 131072, "rope_theta": 10000000.0,
        },
        "32/8 x 128, gated ffn 12800, rope 10000000, silu, tied, scaled 12 0.22 16 0.0078125, eos 0", 8_170_848_256,
    ),
    "mistralai/Mistral-7B-v0.1": Public(
        _MISTRAL, "32/8 x 128, gated ffn 14336, rope 10000, silu, untied, window 4096, eos 2", 7_241_732_096
    ),
    "mistralai/Mistral-7B-v0.3": Public(
        _MISTRAL | {"rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32768},
        "32/8 x 128, gated ffn 14336, rope 1000000, silu, untied, eos 2", 7_248_023_552,
    ),
    "mistralai/Codestral-22B-v0.1": Public(
        _MISTRAL | size(6144, 16384, 56, 48, 8)
        | {"attention_dropout": 0.0, "rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32768},
        "48/8 x 128, gated ffn 16384, rope 1000000, silu, untied, eos 2", 22_247_282_688,
    ),
    "Qwen/Qwen1.5-0.5B": Public(
        _qwen2(1024, 2816, 24, 16, 16) | {"max_window_layers": 21},
        "16/16 x 64, gated ffn 2816, rope 1000000, silu, tied, bias qkv, eos 151643", 463_987_712,
    ),
    "Qwen/Qwen2.5-Coder-0.5B": Public(
        _qwen2(896, 4864, 24, 14, 2) | {"use_mrope": False},
        "14/2 x 64, gated ffn 4864, rope 1000000, silu, tied, bias qkv, eos 151643", 494_032_768,
    ),
    "Qwen/Qwen2.5-Coder-1.5B": Public(
        _qwen2(1536, 8960, 28, 12, 2) | {"max_position_embeddings": 131072, "sliding_window": 131072},
        "12/2 x 128, gated ffn 8960, rope 1000000, silu, tied, bias qkv, eos 151643", 1_543_714_304,
    ),
    "Qwen/Qwen2.5-Coder-3B": Public(
        _qwen2(2048, 11008, 36, 16, 2),
        "16/2 x 128, gated ffn 11008, rope 1000000, silu, tied, bias qkv, eos 151643", 3_085_938_688,
    ),
    "Qwen/Qwen2.5-Coder-7B-Instruct, 128k": Public(
        _qwen2(3584, 18944, 28, 28, 4) | {
            "eos_token_id": 151645, "tie_word_embeddings": False, "vocab_size": 152064,
            "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
        },
        "28/4 x 128, gated ffn 18944, rope 1000000 yarn 4, silu, untied, bias qkv, eos 151645", 7_615_616_512,
    ),
    "Qwen/Qwen2.5-Coder-14B": Public(
        _qwen2(5120, 13824, 48, 40, 8) | {"tie_word_embeddings": False, "vocab_size": 152064},
        "40/8 x 128, gated ffn 13824, rope 1000000, silu, untied, bias qkv, eos 151643", 14_770_033_664,
    ),
    "Qwen/Qwen2.5-Coder-32B": Public(
        _qwen2(5120, 27648, 64, 40, 8) | {"tie_word_embeddings": False, "vocab_size": 152064},
        "40/8 x 128, gated ffn 27648, rope 1000000, silu, untied, bias qkv, eos 151643", 32_763_876_352,
    ),
    "Qwen/Qwen3-0.6B": Public(
        _QWEN3 | size(1024, 3072, 28, 16) | {"max_window_layers": 28},
        "16/8 x 128, gated ffn 3072, rope 1000000, silu, tied, head norms, eos 151645", 596_049_920,
    ),
    "Qwen/Qwen3-1.7B": Public(
        _QWEN3 | size(2048, 6144, 28, 16) | {"max_window_layers": 28},
        "16/8 x 128, gated ffn 6144, rope 1000000, silu, tied, head norms, eos 151645", 1_720_574_976,
    ),
    "Qwen/Qwen3-4B": Public(
        _QWEN3 | size(2560, 9728, 36, 32) | {"max_window_layers": 36},
        "32/8 x 128, gated ffn 9728, rope 1000000, silu, tied, head norms, eos 151645", 4_022_468_096,
    ),
    "Qwen/Qwen3-8B": Public(
        _QWEN3 | size(4096, 12288, 36, 32) | {"max_window_layers": 36, "tie_word_embeddings": False},
        "32/8 x 128, gated ffn 12288, rope 1000000, silu, untied, head norms, eos 151645", 8_190_735_360,
    ),
    "google/gemma-2b": Public(
        _GEMMA | {"hidden_act": "gelu"},
        "8/1 x 256, gated ffn 16384, rope 10000, gelu_tanh, tied, scaled 45.2548 1 1 0.0625, eos 1", 2_506_172_416,
    ),
    "google/codegemma-2b": Public(
        _GEMMA | {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"},
        "8/1 x 256, gated ffn 16384, rope 10000, gelu_tanh, tied, scaled 45.2548 1 1 0.0625, eos 1", 2_506_172_416,
    ),
    "google/codegemma-7b-it": Public(
        _GEMMA | size(3072, 24576, 28, 16, 16)
        | {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"},
        "16/16 x 256, gated ffn 24576, rope 10000, gelu_tanh, tied, scaled 55.4256 1 1 0.0625, eos 1", 8_537_680_896,
    ),
    "google/gemma-7b": Public(
        _GEMMA | size(3072, 24576, 28, 16, 16) | {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": None},
        "16/16 x 256, gated ffn 24576, rope 10000, gelu_tanh, tied, scaled 55.4256 1 1 0.0625, eos 1", 8_537_680_896,
    ),
}  # fmt: skip
