"""Check settings, files and data of a job and read its inputs before process groups exist; checks raise UserError."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_mp import platform
from grpo_mp.algorithms.advantages import AdvantageEstimator, load_estimator
from grpo_mp.algorithms.distillation_settings import DistillationConfig
from grpo_mp.algorithms.losses import load_policy_loss
from grpo_mp.algorithms.policy_losses import PolicyLoss
from grpo_mp.algorithms.selection import Curriculum, GroupFilter, load_curriculum, load_group_filter
from grpo_mp.algorithms.settings import AlgorithmConfig
from grpo_mp.checkpoint.run_state import FINAL, check_run_folder, check_same_data, saved_step
from grpo_mp.checkpoint.settings_changes import use_template_date
from grpo_mp.config import CriticConfig, Settings, dump_settings
from grpo_mp.config.data_sections import DataConfig, EvalSetConfig
from grpo_mp.config.sections import EngineConfig, LayoutConfig, ModelConfig, MonitorConfig, RolloutConfig, RunConfig
from grpo_mp.data.prompts import PromptReader, PromptSet, load_eval_prompts, load_train_prompts
from grpo_mp.distributed.coordinates import tp_size
from grpo_mp.distributed.layout import model_shape
from grpo_mp.models import hf_config
from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.tokenizer import read_tokenizer
from grpo_mp.monitor.loggers import MakeLogger, load_loggers
from grpo_mp.monitor.metrics import find_metric
from grpo_mp.policy.critic import check_critic
from grpo_mp.policy.megatron_config import DTYPES
from grpo_mp.policy.policy import check_policy
from grpo_mp.rewards.code import check_row_tests
from grpo_mp.rewards.scorer import Scorer
from grpo_mp.rewards.settings import RewardConfig
from grpo_mp.rewards.teacher import TeacherClient, check_served_tokens
from grpo_mp.rollout.engine_args import (
    check_arguments,
    check_speculation,
    check_tool_parser,
    speculative_arguments,
)
from grpo_mp.rollout.engine_layout import engine_parallelism, engine_placements, engine_uses_fp8
from grpo_mp.rollout.episodes import EpisodeParts, load_episode_parts
from grpo_mp.rollout.reward_servers import check_served_models, check_tokens, served_models
from grpo_mp.rollout.routed_experts import check_routed_experts
from grpo_mp.rollout.sglang_source import argument_names
from grpo_mp.trainer.replay import ReplayedRollouts
from grpo_mp.utils.errors import UserError
from grpo_mp.weight_sync.wire import WireFormat


@dataclass(frozen=True)
class Extensions:
    """Parts of a run that user code may replace, besides model family, data and rewards."""

    policy_loss: PolicyLoss
    estimator: AdvantageEstimator
    group_filter: GroupFilter
    curriculum: Curriculum | None
    make_loggers: tuple[MakeLogger, ...]


def load_extensions(algorithm: AlgorithmConfig, loggers: Mapping[str, Mapping[str, Any]]) -> Extensions:
    """Load the functions and objects that the settings name."""
    return Extensions(
        load_policy_loss(algorithm),
        load_estimator(algorithm.advantage),
        group_filter=load_group_filter(algorithm.filter),
        curriculum=load_curriculum(algorithm.curriculum),
        make_loggers=load_loggers(loggers),
    )


@dataclass(frozen=True)
class RunInputs:
    """Inputs of a job, read before its process groups exist: model config, tokenizer, prompts, rewards."""

    hf: HfConfig
    tokenizer: PreTrainedTokenizerBase
    train: PromptSet
    evals: dict[str, PromptSet]
    scorer: Scorer
    extensions: Extensions
    warnings: tuple[str, ...] = ()  # shown at the start
    episodes: EpisodeParts | None = None  # None: a sample is a single answer
    replay: ReplayedRollouts | None = None  # None: engines generate
    teacher: TeacherClient | None = None  # None: no distillation, or a replay, whose files have the teacher's logprobs


def run_preflight(settings: Settings, world_size: int, ranks_per_node: int, dump: Path | None = None) -> RunInputs:
    """Check an RL run and read its inputs. `dump`: folder of a replay, which has neither engines nor prompts."""
    model = settings.model
    rollout = settings.rollout
    run = settings.run
    hf = model.read_config()
    extensions = load_extensions(settings.algorithm, settings.monitor.loggers)
    check_place(run, settings.monitor, dump_settings(settings))
    check_attention(model.dtype, settings.layout.context)
    replays_experts = settings.training.router_replay == "R3"
    fp8 = not dump and check_engines(settings.engine, rollout, hf, world_size, ranks_per_node, replays_experts)
    formats = {fp8, run.exports_fp8} if run.export or run.export_every else {fp8}
    check_bucket(hf, model.dtype, settings.layout, settings.sync.bucket_bytes, formats=formats)
    tokenizer = read_tokenizer(model.path, hf, model.trust_remote_code)
    trainers = world_size - settings.engine.ranks
    check_policy(hf, model, layout=settings.layout, training=settings.training, world_size=trainers)
    if settings.critic:
        check_critic(settings.for_critic(), hf, trainers)
    check_critic_tokenizer(settings.critic, model, tokenizer)
    check_export(run, model)
    inputs = partial(RunInputs, hf, tokenizer, extensions=extensions)
    if dump:
        replay = ReplayedRollouts(dump, run.steps)
        check_replay(replay, run)
        # Samples are not scored again, so files that `reward` names may be missing.
        scorer = Scorer(RewardConfig(answer=1.0), rollout.max_response_tokens)
        return inputs(train=PromptSet(str(dump), ()), evals={}, scorer=scorer, replay=replay)

    check_positions(hf, rollout, settings.data.eval)
    reader, episodes = open_prompts(settings.data, rollout, settings.reward, settings.set_weights, tokenizer=tokenizer)
    train, evals = load_train_prompts(reader), load_eval_prompts(reader)
    check_same_data(run.folder, train.digest)
    settings = settings.with_steps(train.epoch_size)
    if problem := settings.warmup_problem:
        raise UserError(problem)
    train.check_size("rollout.prompts_per_step", rollout.prompts_per_step, "prompts", settings.data.train)
    models = served_models(settings.reward, settings.algorithm.distillation)
    longest = settings.max_request_tokens
    check_served_models(models, settings.model, longest, tokenizer, world_size, ranks_per_node)
    scorer = make_scorer(settings.reward, rollout, settings.run.steps, settings.set_weights, tokenizer=tokenizer)
    teacher, unasked = _make_teacher(settings.algorithm.distillation, hf, tokenizer)
    warnings = (
        *scorer.warnings,
        *(sentence for prompts in (train, *evals.values()) for sentence in prompts.warnings),
        *start_warnings(settings.algorithm, rollout, fp8 or settings.engine.has_fp8_cache),
        *unasked,
    )
    return inputs(train=train, evals=evals, scorer=scorer, warnings=warnings, episodes=episodes, teacher=teacher)


def run_generation_preflight(
    settings: Settings, world_size: int, ranks_per_node: int, with_policy: bool, evaluates: bool
) -> RunInputs:
    """Check a job that only generates and read its inputs. `with_policy`: the job builds a policy.

    `evaluates`: the job answers the eval sets, of which the first takes the place of the train prompts in RunInputs.
    """
    model, rollout = settings.model, settings.rollout
    hf = model.read_config()
    check_place(settings.run, settings.monitor, dump_settings(settings))
    check_attention(model.dtype, settings.layout.context)
    if with_policy:
        check_policy(hf, model, layout=settings.layout, training=settings.training, world_size=world_size)
    fp8 = check_engines(settings.engine, rollout, hf, world_size, ranks_per_node=ranks_per_node)
    check_bucket(hf, model.dtype, settings.layout, settings.sync.bucket_bytes, formats={fp8})
    tokenizer = read_tokenizer(model.path, hf, model.trust_remote_code)
    check_positions(hf, rollout, settings.data.eval)
    reader, episodes = open_prompts(settings.data, rollout, settings.reward, settings.set_weights, tokenizer=tokenizer)
    evals = load_eval_prompts(reader)
    train = next(iter(evals.values())) if evaluates else load_train_prompts(reader)
    scorer = make_scorer(settings.reward, rollout, settings.run.steps, settings.set_weights, tokenizer=tokenizer)
    if evaluates:
        scorer = scorer.for_evaluations()
    else:
        models, longest = served_models(settings.reward, None), settings.max_request_tokens
        check_served_models(models, settings.model, longest, tokenizer, world_size, ranks_per_node)
    return RunInputs(
        hf,
        tokenizer,
        train=train,
        evals=evals,
        scorer=scorer,
        extensions=load_extensions(settings.algorithm, settings.monitor.loggers),
        warnings=(*scorer.warnings, *(sentence for one in (evals.values() or [train]) for sentence in one.warnings)),
        episodes=episodes,
    )


def check_place(run: RunConfig, monitor: MonitorConfig, resolved: str) -> None:
    """Check guards and run folder. `resolved`: the settings as YAML."""
    check_guards(monitor.guards)
    check_run_folder(run.folder, resolved, run.resume == "auto")
    use_template_date(run.folder)


def check_attention(dtype: str, context: int) -> None:
    """Check that the device can compute the dtype with context parallelism."""
    if platform.on_cuda() and dtype == "float32" and context > 1:
        raise UserError(
            f"layout.context={context}: no attention kernel divides float32 sequences on a GPU: set "
            "model.dtype=bfloat16 or layout.context=1"
        )


def check_critic_tokenizer(critic: CriticConfig | None, model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the folder of a critic has the policy's tokenizer, or none."""
    path = critic.path if critic else None
    if path and any((path / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        remedy = "take a critic of the policy's family and vocabulary"
        check_tokens(path, "critic.path", tokenizer=tokenizer, remedy=remedy, trust_remote_code=model.trust_remote_code)


def check_engines(
    engine: EngineConfig,
    rollout: RolloutConfig,
    hf: HfConfig,
    world_size: int,
    ranks_per_node: int,
    replays_experts: bool = False,
) -> bool:
    """Check placement and arguments of the engines against the model; return whether engines compute in FP8."""
    cpu = not platform.on_cuda()
    if cpu and hf.is_text_part:
        raise hf.error("engines on a CPU serve text models only, and this model has a vision tower: use GPUs")
    engine_placements(engine, world_size, ranks_per_node)
    check_arguments(engine.args)
    fp8 = engine_uses_fp8(engine.args, hf, cpu)
    check_speculation(engine, hf, cpu)
    if not cpu:
        engine_parallelism(engine.gpus_per_engine, engine.args, hf)
    if replays_experts:
        drafting = speculative_arguments(engine, rollout.group_size)
        check_routed_experts(engine.args | drafting, argument_names(), model_shape(hf))
    return fp8


def check_bucket(
    hf: HfConfig, dtype: str, layout: LayoutConfig, bucket_bytes: int | None, formats: Iterable[bool]
) -> None:
    """Check that `sync.bucket_bytes` holds each group of tensors that an engine must load together.

    `formats`: of engines and exports, which use the same rounds: whether in blockwise FP8.
    """
    params = family_of(hf).params(hf)
    tp_sizes = {name: tp_size(param, layout) for name, param in params.items()}
    for fp8 in set(formats):
        WireFormat(params, tp_sizes, DTYPES[dtype], fp8).round_bytes(bucket_bytes)


def check_replay(replay: ReplayedRollouts, run: RunConfig) -> None:
    """Check that the dump is of another run, and has the steps that are left."""
    if not run.steps:
        raise UserError("run.epochs: a replay reads no prompts to count: set run.steps")
    if replay.folder.resolve().is_relative_to(run.folder.resolve()):
        raise UserError(f"{replay.folder} is of the run in {run.folder} itself: choose another run.folder")
    replay.check_steps(saved_step(run.folder) + 1)


def check_guards(names: Iterable[str]) -> None:
    """Check that the guarded metrics exist."""
    try:
        for name in names:
            find_metric(name, "scalar")
    except ValueError as error:
        raise UserError(f"monitor.guards: {error}") from error


def check_export(run: RunConfig, model: ModelConfig) -> None:
    """Check that the export does not overwrite the model folder that the run starts from."""
    final = run.folder / FINAL
    if run.export and final.resolve() == model.path.resolve():
        raise UserError(
            f"{final}: the export would take the place of model.path: choose another run.folder, or set "
            "run.export=false"
        )


def check_positions(hf: HfConfig, rollout: RolloutConfig, evals: Mapping[str, EvalSetConfig]) -> None:
    """Check that the model has a position for each token of the longest sequence."""
    responses = [0, *(eval_set.max_response_tokens or 0 for eval_set in evals.values())]
    longest = max(rollout.max_response_tokens, *responses)
    setting = "rollout.max_prompt_tokens + max_response_tokens (of rollout and data.eval)"
    hf_config.check_positions(hf, rollout.max_prompt_tokens + longest, setting)


def start_warnings(algorithm: AlgorithmConfig, rollout: RolloutConfig, fp8: bool) -> list[str]:
    """Return warnings if the samples' distribution is not what the loss assumes. `fp8`: engines compute in FP8."""
    warnings = list[str]()
    if rollout.top_p < 1:
        warnings.append(
            f"rollout.top_p={rollout.top_p:g} cuts tokens off the distribution that is trained: they lose probability "
            "at every step, whatever the reward: set rollout.top_p=1 (data.eval.NAME.top_p may be lower)"
        )
    if algorithm.rollout_correction.kind != "none" or algorithm.old_logprobs != "recomputed":
        return warnings
    remedy = "set algorithm.rollout_correction={kind: truncate, high: 2.0}"
    if fp8:
        warnings.append(
            "engines compute in FP8 and algorithm.rollout_correction is none: samples come from other probabilities "
            f"than the policy's, and accuracy is known to drop: {remedy}"
        )
    if rollout.max_staleness:
        warnings.append(
            f"rollout.max_staleness={rollout.max_staleness} trains on tokens of older weights, and "
            f"algorithm.rollout_correction is none: {remedy}"
        )
    return warnings


def make_scorer(
    reward: RewardConfig,
    rollout: RolloutConfig,
    steps: int,
    set_weights: Mapping[str, Mapping[str, float]],
    tokenizer: PreTrainedTokenizerBase,
) -> Scorer:
    """Return the scorer of the rollouts. `set_weights`: weights of the reward terms by data set."""
    limit = rollout.max_response_tokens
    return Scorer(reward, limit, max_steps=steps, decode=tokenizer.decode, set_weights=set_weights)


def open_prompts(
    data: DataConfig,
    rollout: RolloutConfig,
    reward: RewardConfig,
    set_weights: Mapping[str, Mapping[str, float]],
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[PromptReader, EpisodeParts | None]:
    """Return the reader of the prompts, and the parts of episodes; None if a sample is a single answer."""
    if rollout.tool_parser:
        check_tool_parser(rollout.tool_parser)
    episodes = load_episode_parts(rollout, tokenizer, data.chat_template_kwargs)
    tools = episodes.tools.schemas if episodes else ()
    check = partial(check_row_tests, reward, set_weights)
    return PromptReader(data, tokenizer, rollout.max_prompt_tokens, tools, check), episodes


def _make_teacher(
    distillation: DistillationConfig | None, hf: HfConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[TeacherClient | None, list[str]]:
    if distillation is None:
        return None, []
    teacher = TeacherClient(distillation.teacher, distillation.topk, hf.int("vocab_size"))
    if not (distillation.teacher.url and os.environ.get("RANK", "0") == "0"):
        return teacher, []
    if unasked := check_served_tokens(distillation.teacher, tokenizer):
        return teacher, [unasked]
    teacher.check_reply()
    return teacher, []
