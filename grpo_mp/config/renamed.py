"""Settings that have another name now, so that an old file is refused with the new one."""

ALGORITHM = {
    "surrogate": "policy_loss",
    "control_weight": "control_token_weight",
    "clip.dual": "clip.dual_clip",
    "kl.weight": "kl.coef",
    "kl.watch_share": "kl.monitor_share",
    "kl.place": "kl.apply_to",
    "kl.refresh_every": "kl.ref_update_every",
    "kl.refresh_mix": "kl.ref_update_mix",
    "entropy.weight": "entropy.coef",
    "correction": "rollout_correction",
    "correction.off_policy_limit": "rollout_correction.off_policy_mask_threshold",
    "drift": "early_stop",
    "drift.kl": "early_stop.max_kl",
    "drift.effective_samples": "early_stop.min_ess",
    "filter.no_difference": "filter.zero_std",
    "filter.most_tries": "filter.max_launch_factor",
    "filter.max_rounds": "filter.max_launch_factor",
    "filter.admit": "filter.select_by",
    "filter.rest_after": "curriculum.solved_streak",
    "filter.rest_steps": "curriculum.skip_steps",
}
TRAINING = (
    "updates_per_step",
    "epochs",
    "shuffle",
    "max_tokens_per_microbatch",
    "share_prompts",
    "recompute",
    "logprob_chunk_tokens",
)

RENAMED = {
    "engine.gpus": "engine.gpus_per_engine",
    "engine.count": "engine.num_engines",
    "data.eval.NAME.prompts": "data.eval.NAME.max_prompts",
    "algorithm.filter.oversample": "algorithm.filter.oversample_factor",
    "data.prompt": "data.prompt_column",
    "data.answer": "data.answer_column",
    "data.system": "data.system_prompt",
    "reward.right": "reward.correct",
    "reward.right.part": "reward.correct.term",
    "reward.right.at_least": "reward.correct.min_value",
    "reward.model.key_variable": "reward.model.api_key_env",
    "reward.steps.key_variable": "reward.steps.api_key_env",
    "optimizer.decay": "optimizer.lr_schedule",
    "optimizer.megatron": "training.megatron_args",
    **{f"optimizer.{name}": f"training.{name}" for name in TRAINING},
    **{f"algorithm.{old}": f"algorithm.{new}" for old, new in ALGORITHM.items()},
}
# Values that have another name now, by setting.
RENAMED_VALUES = {
    ("algorithm.policy_loss", "none"): "unclipped",
    ("algorithm.advantage.combine", "normalise"): "normalize",
}
