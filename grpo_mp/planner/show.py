"""A plan as tables on a terminal."""

from collections.abc import Iterable, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table

from grpo_mp.distributed.layout import describe
from grpo_mp.planner.clusters import GIB, describe_rates
from grpo_mp.planner.feasibility import Feasibility, check_fits
from grpo_mp.planner.memory import Items, SubPhase, total
from grpo_mp.planner.models_needed import grpo_models, ppo_models
from grpo_mp.planner.plan import Plan
from grpo_mp.planner.search import SearchResult, as_settings

GIGA = 1e9


def show_plan(plan: Plan, verdict: Feasibility, console: Console) -> None:
    """Everything: parameters, memory by kind, traffic and time by stretch, and the verdict last."""
    stage = fullest_stage(plan)
    device = plan.memory.device[stage]
    console.print(Group(_parameters(plan), _memory(f"Device, GiB: a rank of pipeline stage {stage}", device.items())))
    console.print(_memory("Host of the fullest node, GiB", plan.memory.host.items()))
    console.print(_times(plan), *_notes(plan), sep="\n")
    style = "bold green" if verdict.fits else "bold red"
    console.print(
        f"{plan.job.nodes} x {plan.job.gpus_per_node} x {plan.job.cluster.name}: {verdict.sentence}", style=style
    )


def show_models(plan: Plan, console: Console) -> None:
    """GRPO beside PPO."""
    for name, models in (("GRPO", grpo_models(plan)), ("PPO", ppo_models(plan))):
        rows = [(one.model, "yes" if one.trained else "", _gib(one.device), _gib(one.host)) for one in models]
        host = sum(one.host for one in models)
        rows.append(("in all", "", _gib(sum(one.device for one in models)), _gib(host)))
        columns = ("", "trained", "a rank's device, GiB", "a node's host, GiB")
        console.print(table_of(f"Models of {name}", columns, rows))


def show_found(found: SearchResult, console: Console) -> None:
    """The best layouts as settings, after a table that compares them."""
    console.print(
        f"{found.valid:,} valid combinations of layout and engine, {found.fitting:,} fit; by expected step time:"
    )
    for number, plan in enumerate(found.best, start=1):
        verdict = check_fits(plan)
        console.print(
            f"# {number}: {plan.step_s:,.0f} s a step ({plan.roofline_s:,.0f} s at the roofline); "
            f"{verdict.device.spare / GIB:.1f} GiB of a device, {verdict.host.spare / GIB:.0f} GiB of a host to spare"
        )
        console.print(as_settings(plan), markup=False)


def fullest_stage(plan: Plan) -> int:
    """The pipeline stage whose ranks hold most."""
    stages = range(len(plan.memory.device))
    return max(stages, key=lambda stage: max(total(items) for items in plan.memory.device[stage].values()))


def table_of(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """First column words, the others numbers."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1), header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    return table


def _parameters(plan: Plan) -> RenderableType:
    rows = [
        (str(stage), str(len(layers)), f"{count.dense:,}", f"{count.expert:,}", f"{count.total:,}")
        for stage, (layers, count) in enumerate(zip(plan.job.stages, plan.job.counts, strict=True))
    ]
    layout = f"{describe(plan.job.settings.layout)}, data={plan.job.data_parallel}"
    return table_of(
        f"Parameters of one rank ({layout})", ("stage", "layers", "dense", "routed experts", "in all"), rows
    )


def _memory(title: str, by_stretch: Iterable[tuple[SubPhase, Items]]) -> Table:
    stretches = dict(by_stretch)
    kinds = list(dict.fromkeys(kind for items in stretches.values() for kind, size in items.items() if size))
    rows = [
        (str(stretch), *(_gib(items.get(kind, 0)) for kind in kinds), f"{total(items) / GIB:.1f}")
        for stretch, items in stretches.items()
    ]
    return table_of(title, ("", *kinds, "in all"), rows)


def _times(plan: Plan) -> Table:
    rows = []
    for stretch in SubPhase:
        work, time = plan.work[stretch], plan.times[stretch]
        costliest = max(time.parts, key=lambda name: time.parts[name], default="")
        moved = (work.nvlink_bytes, work.network_bytes, work.host_link_bytes + work.host_copy_bytes, work.disk_bytes)
        gigabytes = (f"{size / GIGA:,.1f}" if size else "" for size in moved)
        seconds = (f"{time.roofline_s:,.1f}", f"{time.expected_s:,.1f}")
        rows.append((str(stretch), f"{work.flops / 1e12:,.0f}" if work.flops else "", *gigabytes, *seconds, costliest))
    columns = (
        "",
        "TFLOP",
        "NVLink GB",
        "network GB",
        "host GB",
        "disk GB (node)",
        "roofline s",
        "expected s",
        "mostly",
    )
    return table_of("One step on one GPU (start and load: once)", columns, rows)


def _notes(plan: Plan) -> list[str]:
    stretch, item, seconds = plan.costliest
    job, load = plan.job, plan.memory.engine
    tokens = job.settings.samples_per_step * job.mean_tokens
    return [
        f"step: {plan.step_s:,.0f} s expected, {plan.roofline_s:,.0f} s at the roofline "
        f"({plan.step_s / plan.roofline_s:.1f} times); {item} in {stretch} costs most, {seconds:,.0f} s; "
        f"{tokens / plan.step_s / job.world_size:,.0f} tokens per GPU and second",
        f"engines: {job.engines} of {job.settings.engine.gpus} GPUs; a cache of {load.tokens:,} tokens each "
        f"({load.token_bytes / 1024:.1f} KiB per token on a GPU); {plan.generation.running:,.0f} sequences run at "
        "a time in each replica",
        f"micro-batches of an update on a rank: {job.packing.microbatches}; the busiest rank computes "
        f"{job.packing.padded:.2f} tokens for each token of its share",
        f"assumed: lognormal responses of {job.response_tokens:,.0f} tokens in the mean; achievable of the peaks: "
        f"{describe_rates(job.cluster)}",
    ]


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}" if size else ""
