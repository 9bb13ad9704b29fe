"""Search every valid layout of the trainer and of the engines: those that fit, by the expected time of a step."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import yaml

from grpo_mp.config import Settings
from grpo_mp.config.megatron_fields import FIRST_STAGE_LAYERS, LAST_STAGE_LAYERS, PIPELINE_LAYOUT
from grpo_mp.config.sections import LayoutConfig
from grpo_mp.distributed.coordinates import data_parallel_size
from grpo_mp.distributed.layout import divisors, layout_violations
from grpo_mp.planner.job import PlannedJob, make_job
from grpo_mp.planner.memory import SubPhase, total_bytes
from grpo_mp.planner.parameter_count import parameter_table
from grpo_mp.planner.pipeline_layout import (
    balance_layers,
    format_pipeline_layout,
)
from grpo_mp.planner.plan import Plan, check_fits, make_plan
from grpo_mp.utils.errors import UserError

LAYOUTS_WITH_EVERY_ENGINE = 12
ENGINES_WITH_EVERY_LAYOUT = 4
MAX_ATTENTION_TENSOR = 8  # the most that an engine divides attention by
PLANNED_WITH_SYNC = 16


@dataclass(frozen=True)
class SearchResult:
    """Combinations of layout and engine: how many were valid, how many of them fit, the best, and the job's own."""

    valid: int
    fitting: int
    best: tuple[Plan, ...]
    own: Plan


def search_layouts(job: PlannedJob, count: int = 5) -> SearchResult:
    """Find the fastest layouts for the job's machines, the fastest first. Only layout and engine are changed.

    Raises UserError where the settings' own engine arguments leave no engine that holds the model.
    """
    engines = _fitting_engines(job)
    candidates = [_with_engine(one, engines[0]) for one in _with_layouts(job)]
    fitting = _fitting(candidates)
    layouts = [one for plan in fitting[:LAYOUTS_WITH_EVERY_ENGINE] for one in (plan.job, *_with_even_stages(plan.job))]
    combined = [_with_engine(one, engine) for one in layouts for engine in engines[:ENGINES_WITH_EVERY_LAYOUT]]
    with_sync = [make_plan(plan.job) for plan in _fitting(combined)[:PLANNED_WITH_SYNC]]
    best = sorted(with_sync, key=lambda plan: plan.step_s)[:count]
    return SearchResult(len(candidates) * len(engines), len(fitting) * len(engines), tuple(best), make_plan(job))


def valid_layouts(job: PlannedJob) -> Iterator[LayoutConfig]:
    """Yield layouts that break no rule, with tensor parallelism inside a node and no interleaved pipeline.

    Every data-parallel rank has a sample in every update.
    """
    shape, world_size = job.model, job.train_ranks
    samples = job.settings.samples_per_step // job.settings.training.updates_per_step
    sizes = divisors(world_size)
    tensors = [size for size in sizes if size <= job.gpus_per_node]
    experts = sizes if shape.num_experts else [1]
    for tensor, pipeline, context, expert in product(tensors, sizes, sizes, experts):
        for expert_tensor in sorted({1, tensor} if shape.num_experts else {1}):
            layout = LayoutConfig(
                tensor=tensor, pipeline=pipeline, context=context, expert=expert, expert_tensor=expert_tensor
            )
            valid = next(layout_violations(layout, shape, world_size, uneven_pipeline=True), None) is None
            if valid and pipeline <= shape.num_layers and samples >= data_parallel_size(layout, world_size):
                yield layout


def plan_to_yaml(plan: Plan) -> str:
    """Return what to paste into a settings file."""
    settings = plan.job.settings
    tree: dict[str, Any] = {
        "layout": settings.layout.model_dump(exclude_none=True),
        "engine": {"gpus_per_engine": settings.engine.gpus_per_engine, "args": settings.engine.args},
    }
    if PIPELINE_LAYOUT in settings.training.megatron_args:
        tree["training"] = {"megatron_args": {PIPELINE_LAYOUT: settings.training.megatron_args[PIPELINE_LAYOUT]}}
    return yaml.safe_dump(tree, sort_keys=False, default_flow_style=None, width=120)


def _fitting(jobs: list[PlannedJob]) -> list[Plan]:
    """Plan the jobs and return those that fit, the fastest first; the weight sync is left out.

    It takes longest to plan and least of a step.
    """
    plans = (make_plan(job, with_sync=False) for job in jobs)
    return sorted((plan for plan in plans if check_fits(plan).fits), key=lambda plan: plan.step_s)


def _fitting_engines(job: PlannedJob) -> list[dict[str, Any]]:
    """Return the settings of engines that hold the longest sequence, the fastest first."""
    timed: list[tuple[float, dict[str, Any]]] = []
    for engine in _engine_candidates(job):
        try:
            plan = make_plan(_with_engine(job, engine), with_sync=False)
        except UserError:
            continue  # sizes that do not divide
        needed = total_bytes(plan.memory.engine_device.get(SubPhase.SYNC, plan.memory.device[0][SubPhase.START]))
        if needed <= job.cluster.gpu_bytes and not check_fits(plan).kv_cache_problem:
            timed.append((plan.times[SubPhase.GENERATE].expected_s, engine))
    if not timed:
        raise UserError("search: no engine of these GPUs holds the model and its longest sequence: use more of them")
    return [engine for _, engine in sorted(timed, key=lambda item: item[0])]


def _engine_candidates(job: PlannedJob) -> Iterator[dict[str, Any]]:
    """Yield every size of an engine, and for each every number of replicas of attention."""
    model, per_node = job.model, job.gpus_per_node
    heads = model.num_heads if model.mla_cache_dim else model.num_kv_heads
    parallelism = ("ep_size", "attn_dp_size", "enable_dp_attention", "dp_size")
    other_args = {name: value for name, value in job.settings.engine.args.items() if name not in parallelism}
    for gpus in divisors(job.settings.engine.ranks or job.world_size):
        if max(gpus, per_node) % min(gpus, per_node):
            continue
        expert = {"ep_size": gpus} if model.num_experts and gpus > 1 else {}
        for tensor in (size for size in divisors(gpus) if size <= MAX_ATTENTION_TENSOR and heads % size == 0):
            replicas = {"attn_dp_size": gpus // tensor} if gpus > tensor else {}
            yield {"gpus_per_engine": gpus, "num_engines": None, "args": {**other_args, **expert, **replicas}}


def _with_engine(job: PlannedJob, engine: dict[str, Any]) -> PlannedJob:
    engine_settings = job.settings.engine.model_copy(update=engine)
    return _with_settings(job, job.settings.model_copy(update={"engine": engine_settings}))


def _with_layouts(job: PlannedJob) -> Iterator[PlannedJob]:
    """Yield the job in every layout that its policy allows, and its critic where that has the policy's."""
    for layout in valid_layouts(job):
        try:
            yield _with_layout(job, layout)
        except UserError:
            continue  # sizes that do not divide the critic


def _with_layout(job: PlannedJob, layout: LayoutConfig) -> PlannedJob:
    """Change the layout; layers are balanced over the pipeline stages."""
    placement = (FIRST_STAGE_LAYERS, LAST_STAGE_LAYERS, PIPELINE_LAYOUT)
    megatron = {name: value for name, value in job.settings.training.megatron_args.items() if name not in placement}
    if layout.pipeline > 1:
        table = parameter_table(job.hf, layout.tensor, layout.expert, layout.expert_tensor)
        *sizes, ahead = [table.layers[layer].total for layer in sorted(table.layers)]
        output = table.output.total
        if job.hf.trains_mtp:  # on the last stage, with its copy of the embedding
            output += ahead + table.copied_embedding.total
        else:
            sizes.append(ahead)
        counts = balance_layers(sizes, layout.pipeline, table.embedding.total, output)
        megatron[PIPELINE_LAYOUT] = format_pipeline_layout(counts)
    training = job.settings.training.model_copy(update={"megatron_args": megatron})
    return _with_settings(job, job.settings.model_copy(update={"layout": layout, "training": training}))


def _with_even_stages(job: PlannedJob) -> Iterator[PlannedJob]:
    """Yield the job with as many layers on each stage: stages of equal bytes may differ in time."""
    stages = job.settings.layout.pipeline
    if stages > 1:
        fewest, more = divmod(job.hf.int("num_hidden_layers"), stages)
        yield _with_stages(job, [fewest + (stage < more) for stage in range(stages)])


def _with_stages(job: PlannedJob, layers: list[int]) -> PlannedJob:
    megatron = job.settings.training.megatron_args | {PIPELINE_LAYOUT: format_pipeline_layout(layers)}
    training = job.settings.training.model_copy(update={"megatron_args": megatron})
    return _with_settings(job, job.settings.model_copy(update={"training": training}))


def _with_settings(job: PlannedJob, settings: Settings) -> PlannedJob:
    machines = (job.cluster, job.nodes, job.gpus_per_node)
    return make_job(settings, job.hf, *machines, job.mean_response_tokens, job.acceptance_length)
