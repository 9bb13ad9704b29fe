"""Describe what a start would do, for --dry-run."""

from collections.abc import Iterator

from grpo_mp.config import Settings, show_changed_settings, show_settings
from grpo_mp.data.prompts import PromptSet
from grpo_mp.distributed.layout import describe_parallelism
from grpo_mp.rollout.placement import engine_host_ranks, engine_placements
from grpo_mp.rollout.reward_servers import TEACHER, served_models
from grpo_mp.trainer.preflight import RunInputs
from grpo_mp.utils.section import Section

CHANGED = "settings that differ from the defaults (--all shows every one):"


def describe_settings(settings: Section, every: bool) -> str:
    """Return every setting, or those that differ from the defaults, as YAML without secrets."""
    return show_settings(settings) if every else f"{CHANGED}\n{show_changed_settings(settings)}"


def _describe_prompts(train: PromptSet) -> str:
    left_out = [f"{train.num_too_long} longer than the limit"]
    left_out += [f"{train.num_filtered} for their pass rate"] if train.num_filtered else []
    mixed = (
        f", of which an epoch has {' + '.join(str(share.count) for share in train.mixture)}" if train.mixture else ""
    )
    return f"{len(train)} ({', '.join(left_out)} left out){mixed}"


def _describe_critic(settings: Settings) -> Iterator[str]:
    if settings.critic:
        yield f"critic: {settings.for_critic().model.path}"


def _describe_first_prompt(inputs: RunInputs) -> Iterator[str]:
    if not inputs.replay:
        yield f"first prompt, as the policy reads it: {inputs.train.first_rendered()!r}"


def describe_run(
    settings: Settings, inputs: RunInputs, world_size: int, ranks_per_node: int, every_setting: bool = False
) -> str:
    """Return the facts of a run, its first prompt as text, and its settings as YAML."""
    rollout, training = settings.rollout, settings.training
    layout = describe_parallelism(settings.layout, world_size - settings.engine.ranks)
    samples = {name: eval_set.samples for name, eval_set in settings.data.eval.items()}
    evals = [
        f"{len(prompts)} of {name}" + (f" x {samples[name]} samples" if samples[name] > 1 else "")
        for name, prompts in inputs.evals.items()
    ]
    source = [f"rollouts: those of {inputs.replay.folder}"] if inputs.replay else []
    if not inputs.replay:
        hosts = engine_host_ranks(engine_placements(settings.engine, world_size, ranks_per_node))
        source = [
            f"engines: {len(hosts)} x {settings.engine.gpus_per_engine} rank(s), hosted by ranks {hosts}",
            *(
                f"{name if name == TEACHER else f'reward.{name}'}: {world_size // model.gpus_per_server} servers of "
                f"{model.gpus_per_server} rank(s) on {model.folder}, asleep but in SCORE"
                for name, model in served_models(settings, rewards=True, teacher=True).items()
            ),
            f"train prompts: {_describe_prompts(inputs.train)}; eval: {', '.join(evals) or 'none'}",
        ]
    facts = [
        f"ranks: {world_size}, {ranks_per_node} on each node; layout: {layout}",
        *_describe_critic(settings),
        *source,
        *inputs.overlaps(),
        settings.step_summary,
        f"longest sequence: {rollout.max_prompt_tokens} + {rollout.max_response_tokens} tokens; "
        f"micro-batches of up to {training.max_tokens_per_microbatch} tokens",
        *_describe_first_prompt(inputs),
        *(f"warning: {text}" for text in inputs.warnings),
        f"run folder: {settings.run.folder}; nothing was started",
    ]
    return "\n".join([*facts, "", describe_settings(settings, every_setting)])
