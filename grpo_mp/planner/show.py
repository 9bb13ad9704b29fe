"""Prints a plan as tables on a terminal."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from grpo_mp.distributed.layout import describe_parallelism
from grpo_mp.planner.engine_use import running_sequences
from grpo_mp.planner.memory import BytesByKind, SubPhase, total_bytes
from grpo_mp.planner.plan import Plan, check_fits
from grpo_mp.planner.resource_use import GIGA, TERA
from grpo_mp.utils.phases import GIB

TIME_COLUMNS = ("", "TFLOP", "NVLink GB", "network GB", "host GB", "disk GB (node)", "expected s", "mostly")


def show_plan(plan: Plan, console: Console) -> None:
    """Print whether the plan fits and the step time, then tables of memory, traffic and times."""
    job = plan.job
    memory = plan.memory
    found = check_fits(plan)
    machines = f"{job.nodes} x {job.gpus_per_node} x {job.cluster.name}"
    console.print(f"{machines}: {found.sentence}", style="bold green" if found.fits else "bold red")
    console.print(*_step_notes(plan), sep="\n")
    fullest = max(memory.device, key=lambda sizes: max(map(total_bytes, sizes.values())))
    stage = memory.device.index(fullest)
    console.print(_memory_table(f"Device, GiB: a rank of pipeline stage {stage}", fullest))
    if memory.engine_device:
        console.print(_memory_table("Device, GiB: a GPU of an engine", memory.engine_device))
    console.print(_memory_table("Host of the fullest node, GiB", memory.host))
    console.print(_time_table(plan), *_assumptions(plan), sep="\n")


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1), header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    return table


def _memory_table(title: str, memory: Mapping[SubPhase, BytesByKind]) -> Table:
    kinds = list(dict.fromkeys(kind for sizes in memory.values() for kind, size in sizes.items() if size))
    rows = [
        (str(sub_phase), *(_gib(sizes.get(kind, 0)) for kind in kinds), f"{total_bytes(sizes) / GIB:.1f}")
        for sub_phase, sizes in memory.items()
    ]
    return _table(title, ("", *kinds, "total"), rows)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}" if size else ""


def _time_table(plan: Plan) -> Table:
    """Tabulate the work of one GPU in each sub-phase, and its time."""
    rows = []
    for sub_phase, use in plan.uses.items():
        time = plan.times[sub_phase]
        costliest = max(time, key=lambda name: time[name], default="")
        traffic = (use.nvlink_bytes, use.network_bytes, use.host_link_bytes + use.host_copy_bytes, use.disk_bytes)
        gigabytes = (f"{size / GIGA:,.1f}" if size else "" for size in traffic)
        flops = use.flops + use.fp8_flops
        tflop = f"{flops / TERA:,.0f}" if flops else ""
        rows.append((str(sub_phase), tflop, *gigabytes, f"{sum(time.values()):,.1f}", costliest))
    return _table("One step on one GPU", TIME_COLUMNS, rows)


def _step_notes(plan: Plan) -> list[str]:
    job = plan.job
    tokens = job.settings.samples_per_step * job.mean_seq_len
    notes = [
        f"layout: {describe_parallelism(job.settings.layout, job.train_ranks)}; {job.parameters:,} parameters, "
        f"{job.parameter_counts[job.largest_stage].total:,} on the fullest rank",
        f"step: {plan.step_s:,.1f} s expected; {tokens / plan.step_s / job.world_size:,.0f} tokens per GPU and second",
    ]
    if job.model.num_experts and not job.trains_only:
        notes.append("measured steps of mixtures of experts took 1.5 to 3 times the expected time")
    if not (job.settings.shares_devices or job.trains_only):
        generation_s, training_s, sync_s = plan.sides_s
        notes.append(
            f"schedule {job.settings.schedule}: a step takes the longer of generation, {generation_s:,.0f} s, and "
            f"training, {training_s:,.0f} s, and the weight sync, {sync_s:,.1f} s"
        )
    return notes


def _assumptions(plan: Plan) -> list[str]:
    job = plan.job
    engine = plan.memory.engine
    shares = ", ".join(f"{name} {share:.0%}" for name, share in asdict(job.cluster.achievable).items())
    notes = [
        f"micro-batches of an update on a rank: {job.packing.microbatches}; the busiest rank computes "
        f"{job.packing.load_factor:.2f} tokens for each token of its share",
        f"assumed: lognormal response lengths, mean {job.mean_response_tokens:,.0f} tokens; achievable of the peaks: "
        f"{shares}",
    ]
    if not job.trains_only:
        running = running_sequences(job, engine) / job.engine_parallelism.replicas
        notes.append(
            f"engines: {job.num_engines} of {job.settings.engine.gpus_per_engine} GPUs; a cache of "
            f"{engine.kv_cache_tokens:,} tokens each ({engine.bytes_per_token / 1024:.1f} KiB per token on a GPU); "
            f"{running:,.0f} sequences run at a time in each replica"
        )
    return notes
