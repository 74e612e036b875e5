"""Configurations in the shape of published config.json files: the keys that matter, in the spelling of their time."""

PUBLISHED = {
    "llama-2": {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "rope_scaling": None},
    "llama-3.1": {
        "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "mistral": {"model_type": "mistral", "head_dim": None, "hidden_size": 4096, "num_attention_heads": 32, "rope_theta": 1e6},
    "qwen2.5 with yarn": {
        "model_type": "qwen2", "hidden_size": 3584, "num_attention_heads": 28, "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    },
    "qwen2.5-vl": {
        "model_type": "qwen2_5_vl", "hidden_size": 3584, "num_attention_heads": 28, "max_position_embeddings": 128000,
        "rope_theta": 1000000.0, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    },
    "qwen3-vl": {
        "model_type": "qwen3_vl",
        "text_config": {
            "model_type": "qwen3_vl_text", "head_dim": 128, "hidden_size": 2560, "num_attention_heads": 32,
            "max_position_embeddings": 262144, "rope_theta": 5000000,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        },
    },
    "gemma-2": {"model_type": "gemma2", "head_dim": 256, "hidden_size": 2304, "num_attention_heads": 8, "rope_theta": 10000.0},
    "gemma-3": {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        },
    },
    "gemma-3-1b": {
        "model_type": "gemma3_text", "head_dim": 256, "hidden_size": 1152, "num_attention_heads": 4,
        "max_position_embeddings": 32768, "rope_theta": 1000000, "rope_local_base_freq": 10000, "rope_scaling": None,
    },
    "olmo-3": {
        "model_type": "olmo3", "hidden_size": 4096, "num_attention_heads": 32, "max_position_embeddings": 65536,
        "rope_theta": 500000,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "beta_fast": 32.0, "beta_slow": 1.0,
            "attention_factor": 1.2079441541679836,
        },
    },
    "phi-3": {
        "model_type": "phi3", "hidden_size": 3072, "num_attention_heads": 32, "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096, "rope_theta": 10000.0,
        "rope_scaling": {"long_factor": [2.0] * 48, "short_factor": [1.1] * 48, "type": "longrope"},
    },
    "phi-4-mini": {
        "model_type": "phi3", "hidden_size": 3072, "num_attention_heads": 24, "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75, "rope_theta": 10000.0,
        "rope_scaling": {"long_factor": [2.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
    },
    "phi-2": {"model_type": "phi", "hidden_size": 2560, "num_attention_heads": 32, "partial_rotary_factor": 0.4},
    "deepseek-v3": {
        "model_type": "deepseek_v3", "hidden_size": 7168, "num_attention_heads": 128, "max_position_embeddings": 163840,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rope_theta": 10000,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
    },
    "gpt-oss": {
        "model_type": "gpt_oss", "head_dim": 64, "hidden_size": 2880, "num_attention_heads": 64,
        "max_position_embeddings": 131072, "rope_theta": 150000,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
    },
    "pythia": {
        "model_type": "gpt_neox", "hidden_size": 768, "num_attention_heads": 12, "rotary_pct": 0.25, "rotary_emb_base": 10000,
    },
    "falcon": {"model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71, "alibi": False},
    "stablelm": {
        "model_type": "stablelm", "hidden_size": 2048, "num_attention_heads": 32, "partial_rotary_factor": 0.25,
        "rope_theta": 10000,
    },
    "minimax-m2": {
        "model_type": "minimax_m2", "head_dim": 128, "hidden_size": 3072, "num_attention_heads": 48, "rope_theta": 5000000,
        "rotary_dim": 64,
    },
    "glm-4-0414": {"model_type": "glm4", "head_dim": 128, "partial_rotary_factor": 0.5, "rope_theta": 10000.0},
    "hunyuan": {
        "model_type": "hunyuan_v1_dense", "head_dim": 128, "hidden_size": 4096, "num_attention_heads": 32,
        "max_position_embeddings": 32768, "rope_theta": 10000.0,
        "rope_scaling": {
            "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "type": "dynamic",
        },
    },
    "step-3.5": {
        "model_type": "step3p5", "head_dim": 128, "hidden_size": 4096, "num_attention_heads": 64, "num_hidden_layers": 4,
        "max_position_embeddings": 262144,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"],
        "rope_theta": [5000000.0, 10000.0, 10000.0, 10000.0], "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0],
        "rope_scaling": {
            "rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 131072, "low_freq_factor": 1.0,
            "high_freq_factor": 32.0,
        },
    },
    "deepseek-v4": {
        "model_type": "deepseek_v4", "head_dim": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 3,
        "max_position_embeddings": 1048576, "rope_theta": 10000, "compress_rope_theta": 160000,
        "compress_ratios": [0, 4, 128],
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 16, "original_max_position_embeddings": 65536, "type": "yarn",
        },
    },
    "modernbert": {
        "model_type": "modernbert", "hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 3,
        "global_rope_theta": 160000.0, "local_rope_theta": 10000.0,
    },
}  # fmt: skip
