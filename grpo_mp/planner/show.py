"""Plan a job, and print the plan as tables on a terminal."""

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console, Group
from rich.table import Table

from grpo_mp.distributed.layout import describe_parallelism
from grpo_mp.planner.clusters import describe_rates
from grpo_mp.planner.job import PlannedJob
from grpo_mp.planner.memory import BytesByKind, SubPhase, total_bytes
from grpo_mp.planner.meta_model import check_parameter_counts
from grpo_mp.planner.plan import Feasibility, Plan, check_fits, make_plan
from grpo_mp.planner.resource_use import GIGA, ResourceUse, TimeEstimate
from grpo_mp.planner.speculation import speculation
from grpo_mp.utils.phases import GIB


def plan_and_show(job: PlannedJob, console: Console) -> bool:
    """Print the plan of a job; tell whether it fits."""
    check_parameter_counts(job)
    plan = make_plan(job)
    feasibility = check_fits(plan)
    show_plan(plan, feasibility, console)
    return feasibility.fits


def show_plan(plan: Plan, feasibility: Feasibility, console: Console) -> None:
    """Print whether the plan fits and how long a step takes, then parameters, memory, traffic and times in tables."""
    style = "bold green" if feasibility.fits else "bold red"
    machines = f"{plan.job.nodes} x {plan.job.gpus_per_node} x {plan.job.cluster.name}"
    console.print(f"{machines}: {feasibility.sentence}", style=style)
    console.print(*_step_notes(plan), sep="\n")
    memory, stages = plan.memory, range(len(plan.memory.device))
    fullest = max(stages, key=lambda stage: max(total_bytes(sizes) for sizes in memory.device[stage].values()))
    title = f"Device, GiB: a rank of pipeline stage {fullest}"
    console.print(Group(parameter_table(plan.job), memory_table(title, memory.device[fullest])))
    if memory.engine_device:
        console.print(memory_table("Device, GiB: a GPU of an engine", memory.engine_device))
    console.print(memory_table("Host of the fullest node, GiB", memory.host))
    console.print(_time_table(plan), *_notes(plan), sep="\n")


def table_of(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Align the first column left, the others, which hold numbers, right."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1), header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    return table


def parameter_table(job: PlannedJob) -> Table:
    """Tabulate the parameters of one rank of each stage."""
    rows = [
        (str(stage), str(len(layers)), *(f"{number:,}" for number in (count.dense, count.expert, count.total, trained)))
        for stage, (layers, count, trained) in enumerate(
            zip(job.stage_layers, job.parameter_counts, (one.total for one in job.policy_trained_counts), strict=True)
        )
    ]
    title = f"Parameters of one rank ({describe_parallelism(job.settings.layout, job.train_ranks)})"
    return table_of(title, ("stage", "layers", "dense", "routed experts", "total", "trained"), rows)


def memory_table(title: str, memory: Mapping[SubPhase, BytesByKind]) -> Table:
    """Tabulate bytes by sub-phase and kind."""
    kinds = list(dict.fromkeys(kind for sizes in memory.values() for kind, size in sizes.items() if size))
    rows = [
        (str(sub_phase), *(_gib(sizes.get(kind, 0)) for kind in kinds), f"{total_bytes(sizes) / GIB:.1f}")
        for sub_phase, sizes in memory.items()
    ]
    return table_of(title, ("", *kinds, "total"), rows)


def _time_table(plan: Plan) -> Table:
    moves = plan.job.settings.shares_devices
    shown = [sub_phase for sub_phase in SubPhase if moves or sub_phase is not SubPhase.OFFLOAD]
    uses = {str(sub_phase): (plan.uses[sub_phase], plan.times[sub_phase]) for sub_phase in shown}
    return time_table("One step on one GPU (start and load: once)", uses)


def time_table(title: str, uses: Mapping[str, tuple[ResourceUse, TimeEstimate]]) -> Table:
    """Tabulate what one GPU does in each sub-phase, and how long that takes."""
    rows = []
    for sub_phase, (use, time) in uses.items():
        costliest = max(time.parts, key=lambda name: time.parts[name], default="")
        traffic = (use.nvlink_bytes, use.network_bytes, use.host_link_bytes + use.host_copy_bytes, use.disk_bytes)
        gigabytes = (f"{size / GIGA:,.1f}" if size else "" for size in traffic)
        seconds = (f"{time.roofline_s:,.1f}", f"{time.expected_s:,.1f}")
        flops = use.flops + use.fp8_flops
        rows.append((sub_phase, f"{flops / 1e12:,.0f}" if flops else "", *gigabytes, *seconds, costliest))
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
    return table_of(title, columns, rows)


def _step_notes(plan: Plan) -> list[str]:
    sub_phase, resource, seconds = plan.bottleneck
    job = plan.job
    tokens = job.settings.samples_per_step * job.mean_seq_len
    measured = ["measured steps of mixtures of experts took 1.5 to 3 times the expected time"] * bool(
        job.model.num_experts
    )
    sides = [] if job.settings.shares_devices else [_sides_note(plan)]
    return [
        f"step: {plan.step_s:,.0f} s expected, {plan.roofline_s:,.0f} s at the roofline "
        f"({plan.step_s / plan.roofline_s:.1f} times); {resource} in {sub_phase} costs most, {seconds:,.0f} s; "
        f"{tokens / plan.step_s / job.world_size:,.0f} tokens per GPU and second",
        *measured,
        *sides,
    ]


def _notes(plan: Plan) -> list[str]:
    job, engine = plan.job, plan.memory.engine
    drafts = [_drafts_note(job)] if job.settings.engine.speculative.algorithm != "none" else []
    return [
        f"engines: {job.num_engines} of {job.settings.engine.gpus_per_engine} GPUs; a cache of "
        f"{engine.kv_cache_tokens:,} tokens "
        f"each ({engine.bytes_per_token / 1024:.1f} KiB per token on a GPU); "
        f"{plan.generation.running_per_replica:,.0f} sequences run at a time in each replica",
        *drafts,
        f"micro-batches of an update on a rank: {job.packing.microbatches}; the busiest rank computes "
        f"{job.packing.load_factor:.2f} tokens for each token of its share",
        f"assumed: lognormal response lengths, mean {job.mean_response_tokens:,.0f} tokens; achievable of the peaks: "
        f"{describe_rates(job.cluster)}",
    ]


def _drafts_note(job: PlannedJob) -> str:
    drafts = speculation(job)
    source = "as given" if job.acceptance_length else "assumed: --acceptance-length, from rollout/acceptance_length"
    return (
        f"speculation by {job.settings.engine.speculative.algorithm}: a decode step computes {drafts.verified_tokens} "
        f"tokens of a sequence and yields {drafts.acceptance_length:.2f} ({source}); drafting takes "
        f"{drafts.drafting - 1:.1%} of a step beside it"
    )


def _sides_note(plan: Plan) -> str:
    generation_s, training_s, sync_s = plan.sides_s
    slower, other = ("generation", "the trainer waits") if generation_s > training_s else ("training", "engines wait")
    tail = "; async hides the tail of a step's generation, which is counted here" * (
        plan.job.settings.schedule == "async"
    )
    return (
        f"schedule {plan.job.settings.schedule}: a step takes the longer of generation, {generation_s:,.0f} s, and "
        f"training, {training_s:,.0f} s, and the weight sync, {sync_s:,.1f} s: {slower} sets the pace, {other}{tail}"
    )


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}" if size else ""
