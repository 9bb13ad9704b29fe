"""Check and read everything that needs no process group, model or engine: settings, files, data."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from grpo_mp import platform
from grpo_mp.algorithms.advantages import AdvantageEstimator, load_estimator
from grpo_mp.algorithms.distillation_settings import DistillationConfig
from grpo_mp.algorithms.losses import load_policy_loss
from grpo_mp.algorithms.policy_losses import PolicyLoss
from grpo_mp.algorithms.registries import policy_loss_entry
from grpo_mp.algorithms.selection import Curriculum, GroupFilter, load_curriculum, load_group_filter
from grpo_mp.algorithms.settings import AlgorithmConfig
from grpo_mp.checkpoint.run_state import FINAL, check_run_folder, check_same_data, saved_step
from grpo_mp.checkpoint.settings_changes import use_template_date
from grpo_mp.config import Settings, dump_settings
from grpo_mp.config.sections import EngineConfig, ModelConfig, RunConfig
from grpo_mp.data.prompts import CheckColumns, PromptSet, ToolsOf, load_eval_prompts, load_train_prompts, no_tools
from grpo_mp.data.set_checks import overlap_warnings, smallest_set, too_few
from grpo_mp.distributed.layout import model_shape
from grpo_mp.distributed.nccl_memory import check_nccl
from grpo_mp.distributed.shards import tp_size
from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.multi_token_prediction import engine_params
from grpo_mp.models.tokenizer import read_tokenizer
from grpo_mp.monitor.loggers import MakeLogger, load_loggers
from grpo_mp.monitor.metrics import find_metric
from grpo_mp.policy.critic import check_critic
from grpo_mp.policy.megatron_config import DTYPES
from grpo_mp.policy.parameter_bytes import disk_need
from grpo_mp.policy.policy import check_policy
from grpo_mp.rewards.code import check_row_tests
from grpo_mp.rewards.scorer import Scorer
from grpo_mp.rewards.settings import RewardConfig
from grpo_mp.rewards.teacher import TeacherClient, check_served_tokens
from grpo_mp.rollout.argument_types import argument_types
from grpo_mp.rollout.determinism import check_determinism
from grpo_mp.rollout.engine_args import check_arguments, check_tool_parser
from grpo_mp.rollout.engine_parallelism import EXPERT_LOCATION_ARGS, check_engine_parallelism, engine_parallelism
from grpo_mp.rollout.episodes import EpisodeParts, load_episode_parts
from grpo_mp.rollout.placement import engine_placements
from grpo_mp.rollout.precision import engine_uses_fp8
from grpo_mp.rollout.reward_servers import check_reward_models, check_teacher, check_tokens
from grpo_mp.rollout.routed_experts import check_routed_experts
from grpo_mp.rollout.server import check_temporary_folder
from grpo_mp.rollout.speculation import check_speculation, speculative_arguments
from grpo_mp.trainer.disk_check import check_disk
from grpo_mp.trainer.replay import ReplayedRollouts, open_replay
from grpo_mp.utils.errors import UserError
from grpo_mp.weight_sync.wire import WireFormat


@dataclass(frozen=True)
class Extensions:
    """The parts of a run that users may replace, beside model family, data and rewards."""

    policy_loss: PolicyLoss
    estimator: AdvantageEstimator
    group_filter: GroupFilter
    curriculum: Curriculum | None
    make_loggers: tuple[MakeLogger, ...]


def load_extensions(algorithm: AlgorithmConfig, loggers: Mapping[str, Mapping[str, Any]]) -> Extensions:
    """Load them. Raises UserError, which names the setting, where one cannot be loaded or called."""
    return Extensions(
        load_policy_loss(algorithm),
        load_estimator(algorithm.advantage),
        group_filter=load_group_filter(algorithm.filter),
        curriculum=load_curriculum(algorithm.curriculum),
        make_loggers=load_loggers(loggers),
    )


@dataclass(frozen=True)
class RunInputs:
    """What a run reads: model config, tokenizer, prompts, rewards."""

    hf: HfConfig
    tokenizer: PreTrainedTokenizerBase
    train: PromptSet
    evals: dict[str, PromptSet]
    scorer: Scorer
    extensions: Extensions
    warnings: tuple[str, ...] = ()  # sentences that the start of the run shows
    episodes: EpisodeParts | None = None  # None: a rollout is one answer
    replay: ReplayedRollouts | None = None  # None: engines generate
    teacher: TeacherClient | None = None  # None: nothing is distilled, or a replay has what it said

    def overlaps(self) -> Iterator[str]:
        """Return a sentence for each eval set that shares problems with the train data."""
        return overlap_warnings(self.train.texts(), {name: prompts.texts() for name, prompts in self.evals.items()})


def run_preflight(settings: Settings, world_size: int, ranks_per_node: int) -> RunInputs:
    """Check settings against model, files, layout and engine, and read the data. Raises UserError."""
    extensions = load_extensions(settings.algorithm, settings.monitor.loggers)
    check_guards(settings.monitor.guards)
    hf = settings.model.read_config()
    tokenizer = _check_engines(settings, hf, world_size, ranks_per_node)
    check_policy(
        hf,
        settings.model,
        layout=settings.layout,
        training=settings.training,
        world_size=world_size - settings.engine.ranks,
    )
    check_critic(settings, hf, world_size - settings.engine.ranks)
    _check_critic_tokens(settings, tokenizer)
    check_export(settings.run, settings.model)
    episodes = load_episodes(settings, tokenizer)
    how_read = _how_prompts_are_read(settings, episodes)
    train = load_train_prompts(settings.data, tokenizer, *how_read)
    check_same_data(settings.run.folder, train.digest)
    settings = settings.with_steps(train.epoch_size)
    if problem := settings.warmup_problem:
        raise UserError(problem)
    if train.epoch_size < settings.rollout.prompts_per_step:
        takes = f"rollout.prompts_per_step={settings.rollout.prompts_per_step}"
        smallest = smallest_set("data.train", settings.data.train, train.mixture)
        raise UserError(too_few(train.source, train.epoch_size, unit="prompts", takes=takes, smallest=smallest))
    check_reward_models(settings, tokenizer, world_size, ranks_per_node)
    check_teacher(settings, tokenizer, world_size, ranks_per_node)
    scorer = make_scorer(settings, tokenizer)
    fp8 = engine_uses_fp8(settings.engine.args, hf, cpu=not platform.on_cuda())
    space = check_disk(settings.run.folder, disk_need(settings, hf), probes=os.environ.get("RANK", "0") == "0")
    of_settings = (*start_warnings(settings, fp8), *sync_warnings(settings, hf, fp8))
    evals = load_eval_prompts(settings.data, tokenizer, *how_read)
    of_data, distillation = _data_warnings(train, *evals.values()), settings.algorithm.distillation
    warnings = (*scorer.warnings, *of_data, *of_settings, *space)
    teacher = None
    if distillation:
        teacher, unasked = _make_teacher(distillation, hf, tokenizer)
        warnings = (*warnings, *unasked)
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


def _make_teacher(
    distillation: DistillationConfig, hf: HfConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[TeacherClient, list[str]]:
    """Return the client of a teacher, which the first rank asks once where it is served, and warnings."""
    teacher = TeacherClient(distillation.teacher, distillation.topk, hf.int("vocab_size"))
    if not (distillation.teacher.url and os.environ.get("RANK", "0") == "0"):
        return teacher, []
    if unasked := check_served_tokens(distillation.teacher, tokenizer):
        return teacher, [unasked]
    teacher.check_reply()
    return teacher, []


def _check_critic_tokens(settings: Settings, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError where the critic's folder has another tokenizer than the policy's; it may have none."""
    path = settings.critic.path if settings.critic else None
    if path and any((path / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        remedy = "take a critic of the policy's family and vocabulary"
        check_tokens(
            path, "critic.path", tokenizer=tokenizer, remedy=remedy, trust_remote_code=settings.model.trust_remote_code
        )


def run_replay_preflight(folder: Path, settings: Settings, world_size: int, ranks_per_node: int) -> RunInputs:
    """Check and read what a replay of dumped rollouts needs: neither engines nor prompts. Raises UserError."""
    if not settings.run.steps:
        raise UserError("run.epochs: a replay reads no prompts to count: set run.steps")
    extensions = load_extensions(settings.algorithm, settings.monitor.loggers)
    hf = settings.model.read_config()
    check_run_folder(settings.run.folder, dump_settings(settings), settings.run.resume == "auto")
    if folder.resolve().is_relative_to(settings.run.folder.resolve()):
        raise UserError(f"{folder} is of the run in {settings.run.folder} itself: choose another run.folder")
    check_device_for(settings.sync.transport, settings.model.dtype, settings.layout.context)
    check_policy(hf, settings.model, layout=settings.layout, training=settings.training, world_size=world_size)
    check_critic(settings, hf, world_size)
    check_bucket(settings, hf, fp8=False)  # of the exports
    check_export(settings.run, settings.model)
    replay = open_replay(folder, settings, hf, first=saved_step(settings.run.folder) + 1)
    tokenizer = _read_tokenizer(settings, hf)
    _check_critic_tokens(settings, tokenizer)
    # Nothing is scored anew: what `reward` names need not be there.
    scorer = Scorer(RewardConfig(answer=1.0), settings.rollout.max_response_tokens)
    return RunInputs(
        hf,
        tokenizer,
        train=PromptSet(str(folder), (), 0),
        evals={},
        scorer=scorer,
        extensions=extensions,
        replay=replay,
    )


def run_evaluation_preflight(settings: Settings, world_size: int, ranks_per_node: int, with_policy: bool) -> RunInputs:
    """Check and read what an evaluation of at least one set needs.

    The first set takes the place of the train prompts, which are not read.
    """
    hf, tokenizer, episodes = _check_generation(settings, world_size, ranks_per_node, with_policy)
    evals = load_eval_prompts(settings.data, tokenizer, *_how_prompts_are_read(settings, episodes))
    return _generation_inputs(
        settings, hf, tokenizer=tokenizer, episodes=episodes, train=next(iter(evals.values())), evals=evals
    )


def run_sampling_preflight(settings: Settings, world_size: int, ranks_per_node: int, with_policy: bool) -> RunInputs:
    """Check and read what a sampling of the train prompts needs."""
    hf, tokenizer, episodes = _check_generation(settings, world_size, ranks_per_node, with_policy)
    train = load_train_prompts(settings.data, tokenizer, *_how_prompts_are_read(settings, episodes))
    check_reward_models(settings, tokenizer, world_size, ranks_per_node)
    return _generation_inputs(settings, hf, tokenizer=tokenizer, episodes=episodes, train=train, evals={})


def _check_generation(
    settings: Settings, world_size: int, ranks_per_node: int, with_policy: bool
) -> tuple[HfConfig, PreTrainedTokenizerBase, EpisodeParts | None]:
    """Check what generates; return the model's config and tokenizer, and what rolls out episodes."""
    hf = settings.model.read_config()
    if with_policy:
        check_policy(hf, settings.model, layout=settings.layout, training=settings.training, world_size=world_size)
    tokenizer = _check_engines(settings, hf, world_size, ranks_per_node)
    return hf, tokenizer, load_episodes(settings, tokenizer)


def _how_prompts_are_read(settings: Settings, episodes: EpisodeParts | None) -> tuple[int, ToolsOf, CheckColumns]:
    """Return the tokens of the longest prompt, the tools of a row, and what checks a row for the rewards."""
    tools = episodes.schemas_of if episodes else no_tools
    return settings.rollout.max_prompt_tokens, tools, partial(check_row_tests, settings.reward, settings.set_weights)


def _generation_inputs(
    settings: Settings,
    hf: HfConfig,
    tokenizer: PreTrainedTokenizerBase,
    episodes: EpisodeParts | None,
    train: PromptSet,
    evals: dict[str, PromptSet],
) -> RunInputs:
    """Return the inputs of a job that does not train; without `evals` it samples the train prompts."""
    scorer = make_scorer(settings, tokenizer)
    if evals:
        scorer = scorer.for_evaluations()
    warnings = (*scorer.warnings, *_data_warnings(*(evals.values() or [train])))
    extensions = load_extensions(settings.algorithm, settings.monitor.loggers)
    return RunInputs(
        hf,
        tokenizer,
        train=train,
        evals=evals,
        scorer=scorer,
        extensions=extensions,
        warnings=warnings,
        episodes=episodes,
    )


def _check_engines(settings: Settings, hf: HfConfig, world_size: int, ranks_per_node: int) -> PreTrainedTokenizerBase:
    """Check run folder, engines, device and sizes; return the model's tokenizer."""
    check_run_folder(settings.run.folder, dump_settings(settings), settings.run.resume == "auto")
    use_template_date(settings.run.folder)
    engine_placements(settings.engine, world_size, ranks_per_node)
    check_device_for(settings.sync.transport, settings.model.dtype, settings.layout.context)
    if (
        platform.on_cuda()
        and settings.shares_devices
        and settings.model.offloads
        and settings.training.suspend_communicators
    ):
        check_nccl(torch.cuda.nccl.version(), os.environ)
    check_arguments(settings.engine.args)
    check_temporary_folder()
    check_engine(settings.engine, hf, cpu=not platform.on_cuda())
    check_bucket(settings, hf, fp8=engine_uses_fp8(settings.engine.args, hf, cpu=not platform.on_cuda()))
    if settings.training.router_replay == "R3":
        drafting = speculative_arguments(settings.engine, settings.rollout.group_size)
        check_routed_experts(settings.engine.args | drafting, argument_types().keys(), model_shape(hf))
    return _read_tokenizer(settings, hf)


def _read_tokenizer(settings: Settings, hf: HfConfig) -> PreTrainedTokenizerBase:
    """Read the model's tokenizer. Raises UserError where it cannot be read, or the model is too small for the run."""
    tokenizer = read_tokenizer(settings.model.path, hf, settings.model.trust_remote_code)
    _check_sizes(settings, hf)
    return tokenizer


def load_episodes(settings: Settings, tokenizer: PreTrainedTokenizerBase) -> EpisodeParts | None:
    """Load what rolls out more than one answer. Raises UserError where it cannot be used."""
    if settings.rollout.tool_parser:
        check_tool_parser(settings.rollout.tool_parser)
    return load_episode_parts(settings.rollout, tokenizer, settings.data.chat_template_kwargs)


def _data_warnings(*sets: PromptSet) -> Iterator[str]:
    return (sentence for one in sets for sentence in one.warnings)


def make_scorer(settings: Settings, tokenizer: PreTrainedTokenizerBase) -> Scorer:
    """Make what scores groups. Raises UserError for a reward that cannot be loaded, or take what it asks for."""
    return Scorer(
        settings.reward,
        settings.rollout.max_response_tokens,
        max_steps=settings.run.steps,
        decode=tokenizer.decode,
        set_weights=settings.set_weights,
    )


def check_engine(engine: EngineConfig, hf: HfConfig, cpu: bool) -> None:
    """Raise UserError for precision, GPUs, drafting or attention that do not fit the model."""
    engine_uses_fp8(engine.args, hf, cpu)
    if engine.deterministic:
        check_determinism(engine.args, hf, cpu)
    check_speculation(engine, hf, cpu)
    if not cpu:
        check_engine_parallelism(engine.gpus_per_engine, engine.args, hf)


def check_bucket(settings: Settings, hf: HfConfig, fp8: bool) -> None:
    """Check that a round of `sync.bucket_bytes` holds what an engine loads at once. Raises UserError.

    `fp8`: engines get blockwise FP8; exports, which go through the same rounds, may be in the other format.
    """
    exports = settings.run.export or settings.run.export_every > 0
    for in_fp8 in {fp8, settings.run.export_fp8 if exports else fp8}:
        _wire_format(settings, hf, in_fp8).round_bytes(settings.sync.bucket_bytes)


def sync_warnings(settings: Settings, hf: HfConfig, fp8: bool) -> list[str]:
    """Warn of what makes weight syncs larger than they need to be; `fp8`: engines compute in blockwise FP8."""
    wire, warnings, gpus = _wire_format(settings, hf, fp8), list[str](), settings.engine.gpus_per_engine
    cut = [
        name for name, param in wire.params.items() if fp8 and param.is_projection and not wire.is_whole_blocks(name)
    ]
    if cut:
        warnings.append(
            f"the layout divides {len(cut)} matrices, such as {cut[0]}, inside blocks of 128 x 128: they travel in "
            f"{settings.model.dtype}, twice the bytes, and are quantized where they are put together: lower "
            "layout.tensor or layout.expert_tensor"
        )
    if engine_parallelism(gpus, settings.engine.args, hf).moves_experts:
        warnings.append(
            f"engine.args places experts by their load or more than once ({', '.join(EXPERT_LOCATION_ARGS)}): each "
            f"weight sync brings all experts to each of an engine's {gpus} GPUs"
        )
    return warnings


def _wire_format(settings: Settings, hf: HfConfig, fp8: bool) -> WireFormat:
    params = engine_params(family_of(hf).params(hf), hf, settings.engine.speculative.drafts_by_mtp)
    tp_sizes = {name: tp_size(param, settings.layout) for name, param in params.items()}
    return WireFormat(params, tp_sizes, DTYPES[settings.model.dtype], fp8)


def check_device_for(transport: str, dtype: str, context: int) -> None:
    """Raise UserError for settings that this machine's device cannot compute."""
    if transport == "ipc" and not platform.on_cuda():
        raise UserError("sync.transport=ipc needs CUDA, and this machine computes on its CPU: set auto or host")
    if platform.on_cuda() and dtype == "float32" and context > 1:
        raise UserError(
            f"layout.context={context}: no attention kernel divides float32 sequences on a GPU: set "
            "model.dtype=bfloat16 or layout.context=1"
        )


def check_guards(names: Iterable[str]) -> None:
    """Raise UserError for a guard of a metric that does not exist."""
    try:
        for name in names:
            find_metric(name, "scalar")
    except ValueError as error:
        raise UserError(f"monitor.guards: {error}") from error


def check_export(run: RunConfig, model: ModelConfig) -> None:
    """Raise UserError where the exported folder would overwrite the model that the run starts from."""
    final = run.folder / FINAL
    if run.export and final.resolve() == model.path.resolve():
        raise UserError(
            f"{final}: the export would take the place of model.path: choose another run.folder, or set "
            "run.export=false"
        )


def _check_sizes(settings: Settings, hf: HfConfig) -> None:
    """Check that the model has a position for the longest sequence."""
    positions = hf.int("max_position_embeddings")
    prompt = settings.rollout.max_prompt_tokens
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
    """Warn of settings that have no effect and of an uncorrected mismatch; `fp8`: engines compute in blockwise FP8."""
    algorithm, cache = settings.algorithm, str(settings.engine.args.get("kv_cache_dtype", ""))
    warnings = list(_warn_without_effect(algorithm, settings.optimizer_steps_per_step))
    if settings.engine.deterministic:
        warnings += _warn_of_the_clock(settings)
    if (top_p := settings.rollout.top_p) < 1:
        warnings.append(
            f"rollout.top_p={top_p:g} cuts up to {1 - top_p:.2g} of the probability off each token's distribution, and "
            "logprobs, ratios, corrections and mismatch metrics are of the whole one: the cut tokens lose probability "
            "at every step, whatever the reward: set rollout.top_p=1 (data.eval.NAME.top_p may be lower)"
        )
    in_low_precision = fp8 or cache.startswith("fp8")
    if algorithm.rollout_correction.kind != "none" or algorithm.old_logprobs != "recomputed":
        return warnings
    remedy = "set algorithm.rollout_correction={kind: truncate, high: 2.0}"
    if in_low_precision:
        warnings.append(
            "engines compute in FP8 and algorithm.rollout_correction is none: samples come from other probabilities "
            f"than the policy's, and accuracy is known to drop: {remedy}"
        )
    if settings.rollout.max_staleness:
        warnings.append(
            f"rollout.max_staleness={settings.rollout.max_staleness} trains on tokens of older weights, and "
            f"algorithm.rollout_correction is none: {remedy}"
        )
    return warnings


def _warn_of_the_clock(settings: Settings) -> Iterator[str]:
    if settings.steps_ahead > 0 and settings.rollout.tokens_ahead is None:
        yield (
            "engine.deterministic=true, and the clock decides which weights draw a token: set rollout.tokens_ahead, or "
            "rollout.max_staleness=0"
        )


def _warn_without_effect(algorithm: AlgorithmConfig, updates: int) -> Iterator[str]:
    if updates > 1 or algorithm.old_logprobs == "engine":
        return
    policy_loss, default = policy_loss_entry(algorithm.policy_loss), AlgorithmConfig()
    corrected = policy_loss.applies_correction and algorithm.rollout_correction.kind != "none"  # its ratio is not 1
    idle = [f"ratio={algorithm.ratio}"] if algorithm.ratio != default.ratio else []
    if algorithm.policy_loss == default.policy_loss:
        idle += [name for name in policy_loss.reads if vars(algorithm)[name] != vars(default)[name]]
    elif policy_loss.reads and not corrected:
        idle.append(f"policy_loss={algorithm.policy_loss}")
    if idle:
        yield (
            f"algorithm.preset={algorithm.preset}: with one update a step (training.updates_per_step and "
            f"training.epochs are 1) every importance ratio is 1, and {', '.join(idle)} has no effect: set 2 or more"
        )
