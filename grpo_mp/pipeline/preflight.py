"""Check the stages of a pipeline as their commands do, before the first starts: what torch is needed for.

A stage whose model and data are there is checked by the whole preflight of its command, if the ranks are known on which
it runs. One that waits for what a former stage makes is checked by all that needs neither weights nor rows.
"""

import os
from collections.abc import Sequence
from math import lcm

from grpo_mp.config import Settings, SftSettings
from grpo_mp.config.registries import DATA_SOURCES
from grpo_mp.config.sections import LayoutConfig, TrainingConfig
from grpo_mp.data.rows import SOURCE_BY_SUFFIX
from grpo_mp.distributed.layout import check_layout, model_shape, sets_pipeline_layout
from grpo_mp.evaluate import read_command as read_evaluation
from grpo_mp.models.hf_config import HfConfig, check_positions
from grpo_mp.models.value_head import critic_config
from grpo_mp.monitor.loggers import load_loggers
from grpo_mp.pipeline.inputs import CRITIC, POLICY, StageInputs
from grpo_mp.pipeline.stages import EVALUATE
from grpo_mp.rewards.base import load_reward
from grpo_mp.rollout.placement import engine_placements
from grpo_mp.sample import read_command as read_sampling
from grpo_mp.trainer.context import local_ranks
from grpo_mp.trainer.preflight import (
    check_guards,
    load_extensions,
    run_evaluation_preflight,
    run_preflight,
    run_sampling_preflight,
)
from grpo_mp.trainer.sampling.filters import load_sample_filters
from grpo_mp.trainer.sft_preflight import run_sft_preflight
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.parsers import evaluate_parser, sample_parser

DATA_BYTES = 2**26  # of a stage whose rows are all read: larger sets take minutes, and its own start reads them
LENGTHS = "rollout.max_prompt_tokens + rollout.max_response_tokens"
Size = tuple[int, int]  # ranks, and those of a node


def job_size(ranks: int | None, starts: bool) -> Size | None:
    """Return the size with which stages start on this machine; None where nothing does, and nobody says it."""
    if ranks:
        return ranks, ranks
    return local_ranks() if starts or "WORLD_SIZE" in os.environ else None


def check_stages(inputs: Sequence[StageInputs], size: Size | None) -> None:
    """Check stages that are to run. Raises UserError, with the stage's name, for the first that cannot.

    Without a `size` layouts are compared with the models alone, and nothing with this machine.
    """
    for check in (_check_settings, _check_wholly):  # what takes no time for all stages comes first
        for stage in inputs:
            try:
                check(stage, size)
            except UserError as error:
                raise UserError(f"stage {stage.job.name}: {error}") from error


def _check_settings(stage: StageInputs, size: Size | None) -> None:
    """Check what needs neither weights nor rows. Raises UserError."""
    settings, hf = stage.settings, stage.models[POLICY]
    for file in stage.data:
        if file.source:
            DATA_SOURCES.resolve(file.source, "data.source")
    if isinstance(settings, SftSettings):
        load_loggers(settings.monitor.loggers)
        check_guards(settings.monitor.guards)
        check_positions(hf, settings.sft.max_tokens, "sft.max_tokens")
        _check_layout(settings.layout, hf, settings.training, size and size[0])
        return
    load_extensions(settings.algorithm, settings.monitor.loggers)
    for name in settings.reward.functions:
        load_reward(name, "reward.functions")
    check_positions(hf, settings.rollout.max_sequence_tokens, LENGTHS)
    if stage.job.command == "train":
        check_guards(settings.monitor.guards)
        _check_train(stage, settings, size)
    elif stage.job.command == EVALUATE:
        read_evaluation(evaluate_parser().parse_intermixed_args(stage.job.arguments(None)[1:]))
    else:
        knows_correct = settings.reward.correctness_rule is not None
        load_sample_filters(settings.sample.filters, settings.rollout.group_size, knows_correct)


def _check_train(stage: StageInputs, settings: Settings, size: Size | None) -> None:
    """Check how a run of RL divides its models over the ranks. Raises UserError."""
    policy, ranks = stage.models[POLICY], None
    if size:
        engine_placements(settings.engine, *size)
        ranks = size[0] - settings.engine.ranks
    _check_layout(settings.layout, policy, settings.training, ranks)
    if settings.critic:
        own, critic = settings.for_critic(), critic_config(stage.models.get(CRITIC, policy))
        _check_layout(own.layout, critic, own.training, ranks, "critic.layout")
        read, given = critic.int("vocab_size"), policy.int("vocab_size")
        if read != given:
            raise UserError(
                f"{CRITIC}={own.model.path}: its vocab_size is {read}, the policy's {given}: take a critic of the "
                "policy's vocabulary, or leave critic.path out"
            )


def _check_layout(
    layout: LayoutConfig, hf: HfConfig, training: TrainingConfig, ranks: int | None, setting: str = "layout"
) -> None:
    """Raise UserError where a layout does not divide the model, or so many ranks; None: as few as it is for."""
    fewest = lcm(layout.model_parallel, layout.expert_tensor * layout.expert * layout.pipeline)
    check_layout(layout, model_shape(hf), ranks or fewest, sets_pipeline_layout(training.megatron_args), setting)


def _check_wholly(stage: StageInputs, size: Size | None) -> None:
    """Run the preflight of the stage's command, where what it reads is there, and soon read. Raises UserError."""
    job, settings = stage.job, stage.settings
    if size is None or stage.waits or not _is_soon_read(stage):
        return
    if isinstance(settings, SftSettings):
        run_sft_preflight(settings, size[0])
    elif job.command == "train":
        run_preflight(settings, *size)
    elif job.command == "sample":
        sampling = read_sampling(sample_parser().parse_intermixed_args(job.arguments(None)[1:]))
        run_sampling_preflight(sampling.settings, *size, sampling.needs_policy)
    else:
        evaluation = read_evaluation(evaluate_parser().parse_intermixed_args(job.arguments(None)[1:]))
        run_evaluation_preflight(evaluation.settings, *size, evaluation.needs_policy)


def _is_soon_read(stage: StageInputs) -> bool:
    """Return whether a stage's data are files of a few bytes, and no server is asked, which need not be up yet."""
    settings = stage.settings
    distillation = settings.algorithm.distillation if isinstance(settings, Settings) else None
    if stage.job.command == "train" and distillation and distillation.teacher.url:
        return False
    if any(file.reader not in SOURCE_BY_SUFFIX.values() for file in stage.data):
        return False
    return sum(os.path.getsize(file.path) for file in stage.data) <= DATA_BYTES
