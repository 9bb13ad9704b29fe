"""The plan of supervised fine-tuning: all ranks train, and no engine shares their devices."""

from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console, Group

from grpo_mp.algorithms.settings import AlgorithmConfig, KLConfig
from grpo_mp.config import Settings, SftSettings
from grpo_mp.config.data_sections import DataConfig, TrainSetConfig
from grpo_mp.config.sections import EngineConfig, RolloutConfig, SyncConfig
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.planner.clusters import Cluster, describe_rates
from grpo_mp.planner.engine_memory import EngineMemory
from grpo_mp.planner.job import PlannedJob, make_job
from grpo_mp.planner.memory import BytesByKind, SubPhase, device_memory, host_memory, total_bytes
from grpo_mp.planner.meta_model import check_parameter_counts
from grpo_mp.planner.plan import Feasibility, MemoryPeak, largest_stage, load_use, resume_use, save_uses
from grpo_mp.planner.resource_use import ResourceUse, TimeEstimate, estimate_time
from grpo_mp.planner.show import memory_table, parameter_table, time_table
from grpo_mp.planner.training_use import optimizer_use, train_use
from grpo_mp.rewards.settings import RewardConfig

PLANNED = (SubPhase.LOAD, SubPhase.TRAIN, SubPhase.OPTIMIZER, SubPhase.SAVE)
RESUME = "resume"  # once, instead of load: what a checkpoint has is read
NO_ENGINE = EngineMemory(
    0.0,
    0.0,
    kv_cache=0.0,
    draft_kv_cache=0.0,
    cuda_graphs=0.0,
    communication=0.0,
    bytes_per_token=1.0,
    kv_cache_tokens=0,
)


@dataclass(frozen=True)
class SftPlan:
    """What a job of supervised fine-tuning needs, and how long a step takes it. `uses`, `times`: of one GPU."""

    job: PlannedJob
    device: tuple[Mapping[SubPhase, BytesByKind], ...]
    host: Mapping[SubPhase, BytesByKind]
    uses: Mapping[str, ResourceUse]
    times: Mapping[str, TimeEstimate]

    @property
    def step_s(self) -> float:
        """Return the expected seconds of a step, with its share of saving."""
        save_every = self.job.settings.run.save_every
        save_s = self.times[SubPhase.SAVE].expected_s / save_every if save_every else 0.0
        return self.times[SubPhase.TRAIN].expected_s + self.times[SubPhase.OPTIMIZER].expected_s + save_s

    @property
    def feasibility(self) -> Feasibility:
        """Compare the fullest device and the fullest host with what the machines have."""
        job, per_stage = self.job, self.job.train_ranks // len(self.device)
        device = [(stage, sub_phase) for stage, sizes in enumerate(self.device) for sub_phase in sizes]
        stage, at = max(device, key=lambda item: total_bytes(self.device[item[0]][item[1]]))
        host_at = max(self.host, key=lambda sub_phase: total_bytes(self.host[sub_phase]))
        place = f"rank {stage * per_stage} (pipeline stage {stage})"
        return Feasibility(
            MemoryPeak.of(place, at, self.device[stage][at], job.cluster.gpu_bytes),
            MemoryPeak.of("a node's host", host_at, self.host[host_at], job.cluster.host_bytes),
            kv_cache_problem="",
        )


def sft_job(
    settings: SftSettings,
    hf: HfConfig,
    cluster: Cluster,
    nodes: int,
    gpus_per_node: int | None = None,
    mean_tokens: float | None = None,
) -> PlannedJob:
    """Make the job; `mean_tokens` of a sample: half of the limit where it is not given.

    To the planner it is the trainer of a job of RL whose engines have GPUs of their own. Raises UserError for an
    invalid layout.
    """
    longest = max(2, settings.sft.max_tokens)
    rollout = RolloutConfig(
        prompts_per_step=settings.sft.batch_size, group_size=1, max_prompt_tokens=1, max_response_tokens=longest - 1
    )
    as_trainer = Settings.model_construct(  # the checks are those of RL
        schedule="one_step_off",
        run=settings.run,
        model=settings.model,
        layout=settings.layout,
        data=DataConfig(train={"train": TrainSetConfig(path="unused")}),
        rollout=rollout,
        engine=EngineConfig(),
        reward=RewardConfig(answer=1.0),
        algorithm=AlgorithmConfig(kl=KLConfig(coef=0.0)),
        optimizer=settings.optimizer,
        training=settings.training,
        sync=SyncConfig(),
        monitor=settings.monitor,
    )
    return make_job(
        as_trainer,
        hf,
        cluster=cluster,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        mean_response_tokens=max(1.0, (mean_tokens or longest / 2) - 1),
    )


def make_sft_plan(job: PlannedJob) -> SftPlan:
    """Plan a job of `sft_job`."""
    stage, (weights, rest) = largest_stage(job), save_uses(job)
    uses: dict[str, ResourceUse] = {
        SubPhase.LOAD: load_use(job, stage),
        RESUME: resume_use(job, stage),
        SubPhase.TRAIN: train_use(job),
        SubPhase.OPTIMIZER: optimizer_use(job, stage),
        SubPhase.SAVE: weights + rest,  # the update after it waits for all of it
    }
    devices = (device_memory(job, number, NO_ENGINE) for number in range(len(job.stage_layers)))
    host = host_memory(job, NO_ENGINE)
    return SftPlan(
        job,
        tuple({sub_phase: sizes[sub_phase] for sub_phase in PLANNED} for sizes in devices),
        host={sub_phase: host[sub_phase] for sub_phase in PLANNED},
        uses=uses,
        times={name: estimate_time(use, job.cluster) for name, use in uses.items()},
    )


def plan_and_show_sft(job: PlannedJob, console: Console) -> bool:
    """Print the plan of a job of `sft_job`; tell whether it fits. Raises UserError."""
    check_parameter_counts(job)
    plan = make_sft_plan(job)
    found = plan.feasibility
    machines = f"{job.nodes} x {job.gpus_per_node} x {job.cluster.name}"
    console.print(f"{machines}: {found.sentence}", style="bold green" if found.fits else "bold red")
    fullest = max(plan.device, key=lambda sizes: max(map(total_bytes, sizes.values())))
    title = f"Device, GiB: a rank of pipeline stage {plan.device.index(fullest)}"
    console.print(Group(parameter_table(job), memory_table(title, fullest)))
    console.print(memory_table("Host of the fullest node, GiB", plan.host))
    uses = {name: (use, plan.times[name]) for name, use in plan.uses.items()}
    console.print(time_table("One step on one GPU (load or resume: once)", uses))
    tokens = job.settings.samples_per_step * job.mean_seq_len
    console.print(
        f"step: {plan.step_s:,.1f} s expected; {tokens / plan.step_s / job.world_size:,.0f} tokens per GPU and second",
        f"micro-batches of an update on a rank: {job.packing.microbatches}; the busiest rank computes "
        f"{job.packing.load_factor:.2f} tokens for each token of its share",
        f"assumed: lognormal lengths, mean {job.mean_seq_len:,.0f} tokens; achievable of the peaks: "
        f"{describe_rates(job.cluster)}",
        sep="\n",
    )
    return found.fits
