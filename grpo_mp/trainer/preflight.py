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
from grpo_mp.config import Settings, SftSettings, dump_settings
from grpo_mp.config.sections import EngineConfig, ModelConfig, RunConfig
from grpo_mp.data.prompts import PromptReader, PromptSet, load_eval_prompts, load_train_prompts
from grpo_mp.distributed.coordinates import tp_size
from grpo_mp.distributed.layout import model_shape
from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.multi_token_prediction import engine_params
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
    check_determinism,
    check_speculation,
    check_tool_parser,
    speculative_arguments,
)
from grpo_mp.rollout.engine_layout import check_engine_parallelism, engine_placements, engine_uses_fp8
from grpo_mp.rollout.episodes import EpisodeParts, load_episode_parts
from grpo_mp.rollout.reward_servers import check_served_models, check_tokens
from grpo_mp.rollout.routed_experts import check_routed_experts
from grpo_mp.rollout.sglang_source import argument_names
from grpo_mp.trainer.replay import ReplayedRollouts, open_replay
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


# -- the jobs ------------------------------------------------------------------------------------------------


def run_preflight(settings: Settings, world_size: int, ranks_per_node: int) -> RunInputs:
    """Check an RL run and read its inputs."""
    hf = settings.model.read_config()
    extensions = load_extensions(settings.algorithm, settings.monitor.loggers)
    check_place(settings)
    tokenizer = check_engines(settings, hf, world_size, ranks_per_node)
    check_trained_models(settings, hf, tokenizer, world_size - settings.engine.ranks)
    episodes = load_episodes(settings, tokenizer)
    train, evals = _load_prompts(settings, tokenizer, episodes)
    check_same_data(settings.run.folder, train.digest)
    settings = settings.with_steps(train.epoch_size)
    check_counts(settings, train)
    check_served_models(settings, tokenizer, world_size, ranks_per_node)
    scorer = make_scorer(settings, tokenizer)
    teacher, unasked = _make_teacher(settings.algorithm.distillation, hf, tokenizer)
    fp8 = engine_uses_fp8(settings.engine.args, hf, cpu=not platform.on_cuda())
    warnings = (
        *scorer.warnings,
        *(sentence for prompts in (train, *evals.values()) for sentence in prompts.warnings),
        *start_warnings(settings, fp8),
        *unasked,
    )
    return RunInputs(
        hf,
        tokenizer,
        train=train,
        evals=evals,
        scorer=scorer,
        extensions=extensions,
        warnings=warnings,
        episodes=episodes,
        teacher=teacher,
    )


def run_replay_preflight(folder: Path, settings: Settings, world_size: int) -> RunInputs:
    """Check a replay of dumped rollouts and read its inputs; a replay has neither engines nor prompts."""
    if not settings.run.steps:
        raise UserError("run.epochs: a replay reads no prompts to count: set run.steps")
    if folder.resolve().is_relative_to(settings.run.folder.resolve()):
        raise UserError(f"{folder} is of the run in {settings.run.folder} itself: choose another run.folder")
    hf = settings.model.read_config()
    extensions = load_extensions(settings.algorithm, settings.monitor.loggers)
    check_place(settings)
    tokenizer = read_tokenizer(settings.model.path, hf, settings.model.trust_remote_code)
    check_trained_models(settings, hf, tokenizer, world_size)
    check_bucket(settings, hf, fp8=False)  # exports use the same rounds as a sync
    replay = open_replay(folder, settings, hf, first=saved_step(settings.run.folder) + 1)
    # Samples are not scored again, so files that `reward` names may be missing.
    scorer = Scorer(RewardConfig(answer=1.0), settings.rollout.max_response_tokens)
    train = PromptSet(str(folder), ())
    return RunInputs(hf, tokenizer, train=train, evals={}, scorer=scorer, extensions=extensions, replay=replay)


def run_evaluation_preflight(settings: Settings, world_size: int, ranks_per_node: int, with_policy: bool) -> RunInputs:
    """Check an evaluation of at least one set and read its inputs. `with_policy`: the job builds a policy.

    Train prompts are not read: the first eval set takes their place in RunInputs.
    """
    return _generation_preflight(settings, world_size, ranks_per_node, with_policy, evaluates=True)


def run_sampling_preflight(settings: Settings, world_size: int, ranks_per_node: int, with_policy: bool) -> RunInputs:
    """Check a sampling job on the train prompts and read its inputs. `with_policy`: the job builds a policy."""
    return _generation_preflight(settings, world_size, ranks_per_node, with_policy, evaluates=False)


def _generation_preflight(
    settings: Settings, world_size: int, ranks_per_node: int, with_policy: bool, evaluates: bool
) -> RunInputs:
    hf = settings.model.read_config()
    check_place(settings)
    if with_policy:
        check_policy(hf, settings.model, layout=settings.layout, training=settings.training, world_size=world_size)
    tokenizer = check_engines(settings, hf, world_size, ranks_per_node)
    episodes = load_episodes(settings, tokenizer)
    train, evals = _load_prompts(settings, tokenizer, episodes, with_train=not evaluates)
    if not evaluates:
        check_served_models(settings, tokenizer, world_size, ranks_per_node, teacher=False)
    scorer = make_scorer(settings, tokenizer)
    if evaluates:
        scorer = scorer.for_evaluations()
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


# -- the checks ----------------------------------------------------------------------------------------------


def check_place(settings: Settings | SftSettings) -> None:
    """Check guards and run folder, and that the device can compute the dtype with context parallelism."""
    check_guards(settings.monitor.guards)
    check_run_folder(settings.run.folder, dump_settings(settings), settings.run.resume == "auto")
    use_template_date(settings.run.folder)
    context, dtype = settings.layout.context, settings.model.dtype
    if platform.on_cuda() and dtype == "float32" and context > 1:
        raise UserError(
            f"layout.context={context}: no attention kernel divides float32 sequences on a GPU: set "
            "model.dtype=bfloat16 or layout.context=1"
        )


def check_trained_models(settings: Settings, hf: HfConfig, tokenizer: PreTrainedTokenizerBase, world_size: int) -> None:
    """Check policy, critic and export. `world_size`: number of ranks that train."""
    check_policy(hf, settings.model, layout=settings.layout, training=settings.training, world_size=world_size)
    if settings.critic:
        check_critic(settings.for_critic(), hf, world_size)
    check_export(settings.run, settings.model)
    path = settings.critic.path if settings.critic else None
    if path and any((path / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        remedy, trust = "take a critic of the policy's family and vocabulary", settings.model.trust_remote_code
        check_tokens(path, "critic.path", tokenizer=tokenizer, remedy=remedy, trust_remote_code=trust)


def check_engines(settings: Settings, hf: HfConfig, world_size: int, ranks_per_node: int) -> PreTrainedTokenizerBase:
    """Check placement and arguments of the engines against the model; return the model's tokenizer."""
    cpu = not platform.on_cuda()
    engine_placements(settings.engine, world_size, ranks_per_node)
    check_arguments(settings.engine.args)
    check_engine(settings.engine, hf, cpu)
    check_bucket(settings, hf, fp8=engine_uses_fp8(settings.engine.args, hf, cpu))
    if settings.training.router_replay == "R3":
        drafting = speculative_arguments(settings.engine, settings.rollout.group_size)
        check_routed_experts(settings.engine.args | drafting, argument_names(), model_shape(hf))
    tokenizer = read_tokenizer(settings.model.path, hf, settings.model.trust_remote_code)
    check_positions(settings, hf)
    return tokenizer


def check_counts(settings: Settings, train: PromptSet) -> None:
    """Check that the train set has enough prompts for a step, and that the run is longer than a critic's warmup."""
    if problem := settings.warmup_problem:
        raise UserError(problem)
    train.check_size("rollout.prompts_per_step", settings.rollout.prompts_per_step, "prompts", settings.data.train)


def check_engine(engine: EngineConfig, hf: HfConfig, cpu: bool) -> None:
    """Check that precision, GPU count, speculative decoding and attention of an engine fit the model."""
    engine_uses_fp8(engine.args, hf, cpu)
    if engine.deterministic:
        check_determinism(engine.args, hf, cpu)
    check_speculation(engine, hf, cpu)
    if not cpu:
        check_engine_parallelism(engine.gpus_per_engine, engine.args, hf)


def check_bucket(settings: Settings, hf: HfConfig, fp8: bool) -> None:
    """Check that `sync.bucket_bytes` holds each group of tensors that an engine must load together.

    `fp8`: engines get blockwise FP8. Exports use the same rounds and may have another format, which is checked too.
    """
    params = engine_params(family_of(hf).params(hf), hf, settings.engine.speculative.drafts_by_mtp)
    tp_sizes = {name: tp_size(param, settings.layout) for name, param in params.items()}
    exports = settings.run.export or settings.run.export_every > 0
    for in_fp8 in {fp8, settings.run.exports_fp8 if exports else fp8}:
        wire = WireFormat(params, tp_sizes, DTYPES[settings.model.dtype], in_fp8)
        wire.round_bytes(settings.sync.bucket_bytes)


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


def check_positions(settings: Settings, hf: HfConfig) -> None:
    """Check that the model has a position for each token of the longest sequence."""
    positions, prompt = hf.int("max_position_embeddings"), settings.rollout.max_prompt_tokens
    limits = {"rollout": settings.rollout.max_response_tokens}
    limits |= {f"data.eval.{name}": eval_set.max_response_tokens or 0 for name, eval_set in settings.data.eval.items()}
    for section, response in limits.items():
        if prompt + response > positions:
            raise UserError(
                f"rollout.max_prompt_tokens + {section}.max_response_tokens = {prompt + response}, but the model has "
                f"only {positions} positions (max_position_embeddings of {settings.model.path / 'config.json'}): lower "
                "them"
            )


def start_warnings(settings: Settings, fp8: bool) -> list[str]:
    """Return warnings if the samples' distribution is not what the loss assumes. `fp8`: engines compute in FP8."""
    algorithm = settings.algorithm
    rollout = settings.rollout
    warnings = list[str]()
    if rollout.top_p < 1:
        warnings.append(
            f"rollout.top_p={rollout.top_p:g} cuts tokens off the distribution that is trained: they lose probability "
            "at every step, whatever the reward: set rollout.top_p=1 (data.eval.NAME.top_p may be lower)"
        )
    if algorithm.rollout_correction.kind != "none" or algorithm.old_logprobs != "recomputed":
        return warnings
    remedy = "set algorithm.rollout_correction={kind: truncate, high: 2.0}"
    if fp8 or str(settings.engine.args.get("kv_cache_dtype", "")).startswith("fp8"):
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


# -- the parts -----------------------------------------------------------------------------------------------


def load_episodes(settings: Settings, tokenizer: PreTrainedTokenizerBase) -> EpisodeParts | None:
    """Load tools, environment or rollout function of episodes; None if a sample is a single answer."""
    if settings.rollout.tool_parser:
        check_tool_parser(settings.rollout.tool_parser)
    return load_episode_parts(settings.rollout, tokenizer, settings.data.chat_template_kwargs)


def _load_prompts(
    settings: Settings, tokenizer: PreTrainedTokenizerBase, episodes: EpisodeParts | None, with_train: bool = True
) -> tuple[PromptSet, dict[str, PromptSet]]:
    tools = episodes.tools.schemas if episodes else ()
    check = partial(check_row_tests, settings.reward, settings.set_weights)
    reader = PromptReader(settings.data, tokenizer, settings.rollout.max_prompt_tokens, tools, check)
    train = load_train_prompts(reader) if with_train else None
    evals = load_eval_prompts(reader)
    return train or next(iter(evals.values())), evals


def make_scorer(settings: Settings, tokenizer: PreTrainedTokenizerBase) -> Scorer:
    """Load the rewards into a scorer."""
    return Scorer(
        settings.reward,
        settings.rollout.max_response_tokens,
        max_steps=settings.run.steps,
        decode=tokenizer.decode,
        set_weights=settings.set_weights,
    )


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
