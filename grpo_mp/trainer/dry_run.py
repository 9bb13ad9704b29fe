"""What a run would do, in words. Pure."""

from grpo_mp.config import Settings, dump_settings
from grpo_mp.distributed.coordinates import data_parallel
from grpo_mp.distributed.layout import describe
from grpo_mp.rollout.placement import engine_hosts, engine_placements
from grpo_mp.trainer.preflight import Inputs


def describe_run(settings: Settings, inputs: Inputs, world_size: int, ranks_per_node: int) -> str:
    """Resolved settings, then the facts that follow from them."""
    rollout, optimizer = settings.rollout, settings.optimizer
    hosts = engine_hosts(engine_placements(world_size, ranks_per_node, settings.engine.gpus, settings.engine.count))
    copies = data_parallel(settings.layout, world_size)
    samples = {name: one.samples for name, one in settings.data.eval.items()}
    evals = ", ".join(_eval_set(name, len(one), samples[name]) for name, one in inputs.evals.items()) or "none"
    facts = [
        f"ranks: {world_size}, {ranks_per_node} on each node; layout: {describe(settings.layout)}, data={copies}",
        f"engines: {len(hosts)} x {settings.engine.gpus} rank(s), hosted by ranks {hosts}",
        f"train prompts: {len(inputs.train)} ({inputs.train.left_out} longer than the limit left out); eval: {evals}",
        *inputs.overlaps(),
        f"a step: {rollout.prompts_per_step} prompts x {rollout.group_size} = {settings.samples_per_step} samples, "
        f"{settings.optimizer_steps_per_step} update(s) of {settings.samples_per_step // optimizer.updates_per_step}",
        f"longest sequence: {rollout.max_prompt_tokens} + {rollout.max_response_tokens} tokens; "
        f"micro-batches of up to {optimizer.max_tokens_per_microbatch} tokens",
        *(f"warning: {text}" for text in inputs.warnings),
        f"run folder: {settings.run.folder}; nothing was started",
    ]
    return dump_settings(settings) + "\n" + "\n".join(facts)


def _eval_set(name: str, problems: int, samples: int) -> str:
    return f"{problems} of {name}" + (f" x {samples} samples" if samples > 1 else "")
