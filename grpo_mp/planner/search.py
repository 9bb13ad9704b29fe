"""Every valid layout of the trainer and of the engines: those that fit, ranked by the expected time of a step."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import yaml

from grpo_mp.config import Layout, Settings
from grpo_mp.distributed.layout import layout_violations, model_shape
from grpo_mp.errors import UserError
from grpo_mp.models.families import family_of
from grpo_mp.planner.balance import balanced_text
from grpo_mp.planner.feasibility import check_fits
from grpo_mp.planner.job import Job, make_job
from grpo_mp.planner.memory import SubPhase, total
from grpo_mp.planner.parameter_count import make_table
from grpo_mp.planner.plan import Plan, make_plan
from grpo_mp.planner.stages import FIRST, FREE, LAST

LAYOUTS_WITH_EVERY_ENGINE = 12
ENGINES_WITH_EVERY_LAYOUT = 4
ATTENTION_TENSOR = 8  # the most that an engine divides attention by


@dataclass(frozen=True)
class SearchResult:
    """What a search saw: how many were valid, how many of them fit, and the best."""

    valid: int
    fitting: int
    best: tuple[Plan, ...]


def search(job: Job, wanted: int = 5) -> SearchResult:
    """The best layouts for the job's machines, the first first. Nothing but layout and engine is changed.

    Raises UserError where the settings' own engine arguments leave no engine that holds the model.
    """
    engines = _engines(job)
    layouts = [_with_layout(job, layout) for layout in valid_layouts(job)]
    plans = [make_plan(_with_engine(one, engines[0])) for one in layouts]
    ranked = sorted(filter(_fits, plans), key=lambda plan: plan.step_s)
    mixed = [
        make_plan(_with_engine(plan.job, engine))
        for plan in ranked[:LAYOUTS_WITH_EVERY_ENGINE]
        for engine in engines[:ENGINES_WITH_EVERY_LAYOUT]
    ]
    best = sorted(filter(_fits, mixed), key=lambda plan: plan.step_s)[:wanted]
    return SearchResult(len(layouts) * len(engines), len(ranked) * len(engines), tuple(best))


def valid_layouts(job: Job) -> Iterator[Layout]:
    """Every layout that breaks no rule, tensor parallelism inside a node; pipelines are balanced, not interleaved."""
    shape, world_size = model_shape(family_of(job.hf).config(job.hf)), job.world_size
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    tensors = [size for size in sizes if size <= job.gpus_per_node]
    experts = sizes if shape.experts else [1]
    for tensor, pipeline, context, expert in product(tensors, sizes, sizes, experts):
        for expert_tensor in sorted({1, tensor} if shape.experts else {1}):
            sized = {"tensor": tensor, "pipeline": pipeline, "context": context}
            layout = Layout(**sized, expert=expert, expert_tensor=expert_tensor)
            valid = next(layout_violations(layout, shape, world_size, uneven_pipeline=True), None) is None
            if valid and pipeline <= shape.layers and _enough_samples(job.settings, layout, world_size):
                yield layout


def as_settings(plan: Plan) -> str:
    """What to paste into a settings file."""
    settings = plan.job.settings
    tree: dict[str, Any] = {
        "layout": settings.layout.model_dump(exclude_none=True),
        "engine": {"gpus": settings.engine.gpus, "args": settings.engine.args},
    }
    if FREE in settings.optimizer.megatron:
        tree["optimizer"] = {"megatron": {FREE: settings.optimizer.megatron[FREE]}}
    return yaml.safe_dump(tree, sort_keys=False, default_flow_style=None, width=120)


def _enough_samples(settings: Settings, layout: Layout, world_size: int) -> bool:
    """Every data-parallel rank has a sample in every update."""
    ranks = world_size // (layout.tensor * layout.pipeline * layout.context)
    return settings.samples_per_step // settings.optimizer.updates_per_step >= ranks


def _engines(job: Job) -> list[dict[str, Any]]:
    """Settings of engines that hold the longest sequence, the fastest first."""
    found: list[tuple[float, int, dict[str, Any]]] = []
    for engine in _engine_candidates(job):
        try:
            plan = make_plan(_with_engine(job, engine))
        except UserError:
            continue  # sizes that do not divide
        held = total(plan.memory.device[0][SubPhase.START])
        if held <= job.cluster.gpu_bytes and not check_fits(plan).complaint:
            found.append((plan.times[SubPhase.GENERATE].expected_s, len(found), engine))
    if not found:
        raise UserError("search: no engine of these GPUs holds the model and its longest sequence: use more of them")
    return [engine for _, _, engine in sorted(found)]


def _engine_candidates(job: Job) -> Iterator[dict[str, Any]]:
    shape, per_node = job.shape, job.gpus_per_node
    for gpus in (size for size in range(1, job.world_size + 1) if job.world_size % size == 0):
        if max(gpus, per_node) % min(gpus, per_node):
            continue
        heads = shape.heads if shape.latent_width else shape.kv_heads
        tensor = max(size for size in range(1, min(gpus, ATTENTION_TENSOR) + 1) if gpus % size == heads % size == 0)
        sizes = {"ep_size": gpus} if shape.experts and gpus > 1 else {}
        replicas = {"attn_dp_size": gpus // tensor} if gpus > tensor else {}
        dropped = ("ep_size", "attn_dp_size", "enable_dp_attention", "dp_size")
        kept = {name: value for name, value in job.settings.engine.args.items() if name not in dropped}
        yield {"gpus": gpus, "count": None, "args": {**kept, **sizes, **replicas}}


def _with_engine(job: Job, engine: dict[str, Any]) -> Job:
    changed = job.settings.model_copy(update={"engine": job.settings.engine.model_copy(update=engine)})
    return _again(job, changed)


def _with_layout(job: Job, layout: Layout) -> Job:
    megatron = {
        name: value for name, value in job.settings.optimizer.megatron.items() if name not in (FIRST, LAST, FREE)
    }
    if layout.pipeline > 1:
        table = make_table(job.hf, layout.tensor, layout.expert, layout.expert_tensor)
        megatron[FREE] = balanced_text(table, layout.pipeline)
    optimizer = job.settings.optimizer.model_copy(update={"megatron": megatron})
    return _again(job, job.settings.model_copy(update={"layout": layout, "optimizer": optimizer}))


def _again(job: Job, settings: Settings) -> Job:
    return make_job(settings, job.hf, job.cluster, job.nodes, job.gpus_per_node, job.response_tokens)


def _fits(plan: Plan) -> bool:
    return check_fits(plan).fits
