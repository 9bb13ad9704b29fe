"""Describe the run that the settings would start, for --dry-run."""

import math
from collections.abc import Iterable, Iterator

from grpo_mp.config import Settings, SftSettings, show_changed_settings, show_settings
from grpo_mp.data.prompts import PromptSet
from grpo_mp.distributed.layout import describe_parallelism
from grpo_mp.rollout.engine_layout import engine_host_ranks, engine_placements
from grpo_mp.rollout.reward_servers import TEACHER, served_models
from grpo_mp.trainer.preflight import RunInputs
from grpo_mp.trainer.sft_preflight import SftInputs, show_learned

CHANGED = "settings that differ from the defaults (--all shows every one):"


def describe_run(
    settings: Settings, inputs: RunInputs, world_size: int, ranks_per_node: int, every_setting: bool = False
) -> str:
    """Return the dry-run text of an RL run: layout, sizes, first prompt, warnings, and settings as YAML."""
    layout = describe_parallelism(settings.layout, world_size - settings.engine.ranks)
    rollout, limit = settings.rollout, settings.training.max_tokens_per_microbatch
    facts = [
        f"ranks: {world_size}, {ranks_per_node} on each node; layout: {layout}",
        *([f"critic: {settings.for_critic().model.path}"] if settings.critic else []),
        *_describe_rollouts(settings, inputs, world_size, ranks_per_node),
        settings.step_summary,
        f"longest sequence: {rollout.max_prompt_tokens} + {rollout.max_response_tokens} tokens; micro-batches of up to "
        f"{limit} tokens",
    ]
    if not inputs.replay:
        first = inputs.tokenizer.decode(list(inputs.train[0].tokens), clean_up_tokenization_spaces=False)
        facts.append(f"first prompt, as the policy reads it: {first!r}")
    return _describe(settings, facts, inputs.warnings, every_setting)


def _describe_rollouts(settings: Settings, inputs: RunInputs, world_size: int, ranks_per_node: int) -> Iterator[str]:
    if inputs.replay:
        yield f"rollouts: from {inputs.replay.folder}"
        return
    hosts = engine_host_ranks(engine_placements(settings.engine, world_size, ranks_per_node))
    yield f"engines: {len(hosts)} x {settings.engine.gpus_per_engine} rank(s), hosted by ranks {hosts}"
    for name, model in served_models(settings, rewards=True, teacher=True).items():
        yield (
            f"{name if name == TEACHER else 'reward.model'}: {world_size // model.gpus_per_server} servers of "
            f"{model.gpus_per_server} rank(s) on {model.folder}, asleep but in SCORE"
        )
    samples = {name: eval_set.samples for name, eval_set in settings.data.eval.items()}
    evals = [
        f"{len(prompts)} of {name}" + (f" x {samples[name]} samples" if samples[name] > 1 else "")
        for name, prompts in inputs.evals.items()
    ]
    yield f"train prompts: {_describe_prompts(inputs.train)}; eval: {', '.join(evals) or 'none'}"


def _describe_prompts(train: PromptSet) -> str:
    filtered = f", {train.filtered} for their pass rate" if train.filtered else ""
    counts = " + ".join(str(share.count) for share in train.mixture)
    mixed = f", of which an epoch has {counts}" if train.mixture else ""
    return f"{len(train)} ({train.too_long} longer than the limit{filtered} left out){mixed}"


def describe_sft(
    settings: SftSettings, inputs: SftInputs, world_size: int, ranks_per_node: int, every_setting: bool = False
) -> str:
    """Return the dry-run text of an SFT run: layout, sizes, first sample, warnings, and settings as YAML."""
    sft = settings.sft
    train = inputs.train
    steps = settings.run.steps
    lengths, num_learned = train.sizes.T
    learned = num_learned.sum() / lengths.sum()
    evals = ", ".join(f"{len(held_out)} of {name}" for name, held_out in inputs.evals.items()) or "none"
    epochs = min(
        settings.run.epochs or math.inf, steps * sft.batch_size / train.epoch_size
    )  # the last step may be partial
    layout = describe_parallelism(settings.layout, world_size)
    facts = [
        f"ranks: {world_size}, {ranks_per_node} on each node; layout: {layout}",
        f"train samples: {len(train)} ({train.too_long} left out, longer than {sft.max_tokens} tokens); "
        f"{lengths.mean():.0f} tokens each, up to {lengths.max()}, {learned:.0%} of them learned; eval: {evals}",
        f"{steps} steps of {sft.batch_size} samples: {epochs:.2f} epochs; micro-batches of up to "
        f"{settings.training.max_tokens_per_microbatch} tokens",
        f"first sample, what is learned in [[ ]]: {show_learned(inputs)}",
    ]
    return _describe(settings, facts, inputs.warnings, every_setting)


def _describe(
    settings: Settings | SftSettings, facts: Iterable[str], warnings: Iterable[str], every_setting: bool
) -> str:
    shown = show_settings(settings) if every_setting else f"{CHANGED}\n{show_changed_settings(settings)}"
    end = f"run folder: {settings.run.folder}; nothing was started"
    return "\n".join([*facts, *(f"warning: {text}" for text in warnings), end, "", shown])
