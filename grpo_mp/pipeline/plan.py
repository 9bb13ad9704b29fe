"""The plan of a whole pipeline: whether each stage fits the machines, and how many hours of them it takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from rich.console import Console

from grpo_mp.config import PipelineSettings, Settings, SftSettings
from grpo_mp.models.hf_config import HfConfig, check_positions
from grpo_mp.pipeline.stages import EVALUATE, MODEL, StageJob, find_maker, load_job_settings, make_jobs, model_folders
from grpo_mp.planner.clusters import Cluster
from grpo_mp.planner.job import make_job
from grpo_mp.planner.memory import SubPhase
from grpo_mp.planner.meta_model import check_parameter_counts
from grpo_mp.planner.model_configs import find_config
from grpo_mp.planner.parameter_count import ComingModel, stored_bytes
from grpo_mp.planner.plan import check_engines_fit, check_fits, make_plan
from grpo_mp.planner.sft import make_sft_plan, sft_job
from grpo_mp.planner.show import table_of
from grpo_mp.policy.parameter_bytes import bytes_per_parameter
from grpo_mp.utils.errors import UserError

COLUMNS = ("stage", "command", "fits", "steps", "s a step", "hours", "GPU hours")


@dataclass(frozen=True)
class Machines:
    """What every stage runs on."""

    cluster: Cluster
    nodes: int
    gpus_per_node: int | None = None  # None: the cluster's
    mean_tokens: float | None = None  # of a response, or of a supervised sample in full; None: half of the limit


@dataclass(frozen=True)
class StagePlan:
    """One stage: `why` says whether it fits; a step of `sample` answers `rollout.prompts_per_step` prompts.

    Evaluations, starts and loads are not counted.
    """

    name: str
    command: str
    fits: bool
    why: str
    steps: int
    step_s: float
    gpus: int

    @property
    def hours(self) -> float:
        """Return the expected hours of the stage."""
        return self.steps * self.step_s / 3600

    @property
    def row(self) -> tuple[str, ...]:
        """Return the cells of COLUMNS."""
        cells = (f"{self.steps:,}", f"{self.step_s:,.1f}", f"{self.hours:,.1f}", f"{self.hours * self.gpus:,.0f}")
        return (self.name, self.command, "yes" if self.fits else "no", *cells)


def plan_pipeline(settings: PipelineSettings, file: Path, machines: Machines) -> list[StagePlan]:
    """Plan every stage of a pipeline, which was read from `file`. Raises UserError, with the stage's name."""
    plans, made = list[StagePlan](), dict[str, ComingModel]()
    stages = [job for job in make_jobs(settings, file) if job.command != EVALUATE]
    loaded = dict[str, Settings | SftSettings]()
    for number, job in enumerate(stages):
        try:
            loaded[job.name] = load_job_settings(job)
            coming = _coming_models(job, loaded[job.name], stages[:number], made)
            begins = coming.get(loaded[job.name].model.path)
            hf = begins.hf if begins else find_config(loaded[job.name].model.path)[0]
            plans.append(_plan_stage(job, loaded[job.name], hf, settings.stages[job.name].rows, coming, machines))
        except UserError as error:
            raise UserError(f"stage {job.name}: {error}") from error
        if job.command != "sample":
            made[job.name] = _made_model(loaded[job.name], hf)
    return plans


def show_pipeline_plan(plans: Sequence[StagePlan], machines: Machines, console: Console) -> bool:
    """Print a row for each stage and their sum, and what does not fit; tell whether all fit."""
    gpus = plans[0].gpus
    hours = sum(plan.hours for plan in plans)
    total = ("all", "", "", "", "", f"{hours:,.1f}", f"{hours * gpus:,.0f}")
    console.print(
        table_of(f"Stages on {gpus} x {machines.cluster.name}", COLUMNS, [*(plan.row for plan in plans), total])
    )
    for plan in plans:
        if not plan.fits:
            console.print(f"{plan.name}: {plan.why}", style="bold red")
    return all(plan.fits for plan in plans)


def _coming_models(
    job: StageJob, settings: Settings | SftSettings, former: Sequence[StageJob], made: Mapping[str, ComingModel]
) -> dict[Path, ComingModel]:
    """Return by folder the models that a stage takes of former ones; `made`: what each of those ends with."""
    found = dict[Path, ComingModel]()
    for setting, path in model_folders(job, settings).items():
        if not (maker := find_maker(path, former)):
            continue
        stage, rest = maker
        if stage.name not in made or not MODEL.fullmatch(rest):
            raise UserError(f"{setting}={path} is no model: stage {stage.name} ({stage.command}) makes none there")
        found[path] = made[stage.name]
    return found


def _made_model(settings: Settings | SftSettings, hf: HfConfig) -> ComingModel:
    """Return the model that a run exports, at its end and before; `hf`: of the one that it begins with."""
    model = settings.model
    hf = replace(hf, family=model.family, trains_mtp=model.trains_mtp)
    width = bytes_per_parameter(model.dtype, settings.training.megatron_args, settings.optimizer.offload).weights
    return ComingModel(hf, stored_bytes(hf, width, settings.run.export_fp8))


def _plan_stage(
    stage_job: StageJob,
    settings: Settings | SftSettings,
    hf: HfConfig,
    rows: int | None,
    coming: Mapping[Path, ComingModel],
    machines: Machines,
) -> StagePlan:
    """Plan one stage, which begins with a model of this config; `coming`: those that it takes of former stages."""
    if isinstance(settings, SftSettings):
        check_positions(hf, settings.sft.max_tokens, "sft.max_tokens")
        return _plan_sft(stage_job, settings, hf, rows, machines)
    lengths = "rollout.max_prompt_tokens + rollout.max_response_tokens"
    check_positions(hf, settings.rollout.max_sequence_tokens, lengths)
    samples = stage_job.command == "sample"
    settings = settings.for_sampling() if samples else settings
    job = make_job(
        settings,
        hf,
        machines.cluster,
        machines.nodes,
        machines.gpus_per_node,
        machines.mean_tokens,
        coming=coming,
    )
    check_parameter_counts(job)
    plan = make_plan(job)
    fits = check_engines_fit(plan) if samples else check_fits(plan)
    step_s = plan.times[SubPhase.GENERATE].expected_s if samples else plan.step_s
    steps = _steps(settings, rows, samples)
    return StagePlan(stage_job.name, stage_job.command, fits.fits, fits.sentence, steps, step_s, job.world_size)


def _plan_sft(
    stage_job: StageJob, settings: SftSettings, hf: HfConfig, rows: int | None, machines: Machines
) -> StagePlan:
    job = sft_job(settings, hf, machines.cluster, machines.nodes, machines.gpus_per_node, machines.mean_tokens)
    check_parameter_counts(job)
    plan, steps = make_sft_plan(job), settings.run.steps
    if settings.sft.epochs is not None:
        of_epochs = ceil(_needed(rows, "sft.epochs") * settings.sft.epochs / settings.sft.batch_size)
        steps = min(steps or of_epochs, of_epochs)
    fits = plan.feasibility
    return StagePlan(stage_job.name, stage_job.command, fits.fits, fits.sentence, steps, plan.step_s, job.world_size)


def _steps(settings: Settings, rows: int | None, samples: bool) -> int:
    """Return how many steps a stage of `train` or `sample` takes."""
    per_step = settings.rollout.prompts_per_step
    if samples:
        prompts = _needed(rows, "grpo-mp sample")
        return ceil(min(prompts, settings.sample.max_prompts or prompts) / per_step)
    if settings.run.epochs is None:
        return settings.run.steps
    return ceil(_needed(rows, "run.epochs") * settings.run.epochs / per_step)


def _needed(rows: int | None, why: str) -> int:
    if rows is None:
        raise UserError(f"its length follows from its data ({why}): say how many rows that has, as rows: 10000")
    return rows
