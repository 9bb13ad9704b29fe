"""Published config.json files, as the planner ships them, with the model sizes that publishers state."""

from typing import Any

from grpo_mp.planner.model_configs import named_config, published_config

# name -> its config.json, and its size in parameters: as its publisher counts, here without multi-token prediction
PUBLISHED: dict[str, tuple[dict[str, Any], float]] = {
    name: (published_config(name).values, size)
    for name, size in {
        "deepseek-r1": 671e9,
        "deepseek-v3.2": 671e9,
        "kimi-k2": 1026e9,
        "moonlight-16b-a3b": 16e9,
        "deepseek-v2-lite": 15.7e9,
        "qwen3-30b-a3b": 30.5e9,
        "qwen3-235b-a22b": 235e9,
        "glm-4.5": 353e9,
        "glm-4.5-air": 106.9e9,
        "glm-4.7-flash": 30e9,
        "glm-5": 744e9,
        "minimax-m2": 230e9,
        "hy3-preview": 295e9,
        "mixtral-8x22b": 140.6e9,
        "llama-3.2-1b": 1.236e9,
        "qwen2.5-7b": 7.62e9,
        "qwen2.5-math-7b": 7.62e9,
    }.items()
} | {"deepseek-v2": (named_config("DeepSeek-V2").values, 236e9)}
