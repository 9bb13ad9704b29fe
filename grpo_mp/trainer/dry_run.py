"""Describe what a run would do. Pure."""

from grpo_mp.config import Settings, dump_settings
from grpo_mp.distributed.layout import describe_parallelism
from grpo_mp.planner.explain import describe_step
from grpo_mp.rollout.placement import engine_hosts, engine_placements
from grpo_mp.trainer.preflight import Inputs


def describe_run(settings: Settings, inputs: Inputs, world_size: int, ranks_per_node: int) -> str:
    """Return the resolved settings as YAML, then the facts that follow from them."""
    rollout, training = settings.rollout, settings.training
    hosts = engine_hosts(engine_placements(world_size, ranks_per_node, settings.engine.gpus, settings.engine.count))
    layout = describe_parallelism(settings.layout, world_size)
    samples = {name: eval_set.samples for name, eval_set in settings.data.eval.items()}
    evals = [_describe_eval(name, len(prompts), samples[name]) for name, prompts in inputs.evals.items()]
    facts = [
        f"ranks: {world_size}, {ranks_per_node} on each node; layout: {layout}",
        f"engines: {len(hosts)} x {settings.engine.gpus} rank(s), hosted by ranks {hosts}",
        f"train prompts: {len(inputs.train)} ({inputs.train.left_out} longer than the limit left out); eval: "
        f"{', '.join(evals) or 'none'}",
        *inputs.overlaps(),
        describe_step(settings),
        f"longest sequence: {rollout.max_prompt_tokens} + {rollout.max_response_tokens} tokens; "
        f"micro-batches of up to {training.max_tokens_per_microbatch} tokens",
        *(f"warning: {text}" for text in inputs.warnings),
        f"run folder: {settings.run.folder}; nothing was started",
    ]
    return dump_settings(settings) + "\n" + "\n".join(facts)


def _describe_eval(name: str, problems: int, samples: int) -> str:
    return f"{problems} of {name}" + (f" x {samples} samples" if samples > 1 else "")
