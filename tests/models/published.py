"""Published config.json files, as the planner ships them, with the model sizes that publishers state."""

from typing import Any

from grpo_mp.planner.model_configs import published_config

DEEPSEEK_V2: dict[str, Any] = published_config("deepseek-v2-lite").values | {  # as the model of 236 billion differs
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "n_routed_experts": 160,
    "n_group": 8,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
    "routed_scaling_factor": 16.0,
}
# name -> its config.json, and its size in parameters: as its publisher counts, here without multi-token prediction
PUBLISHED: dict[str, tuple[dict[str, Any], float]] = {
    name: (published_config(name).values, size)
    for name, size in {
        "deepseek-r1": 671e9,
        "kimi-k2": 1026e9,
        "moonlight-16b-a3b": 16e9,
        "deepseek-v2-lite": 15.7e9,
        "qwen3-30b-a3b": 30.5e9,
        "qwen3-235b-a22b": 235e9,
        "glm-4.5": 353e9,
        "glm-4.5-air": 106.9e9,
        "mixtral-8x22b": 140.6e9,
        "llama-3.2-1b": 1.236e9,
        "qwen2.5-7b": 7.62e9,
        "qwen2.5-math-7b": 7.62e9,
    }.items()
} | {"deepseek-v2": (DEEPSEEK_V2, 236e9)}
