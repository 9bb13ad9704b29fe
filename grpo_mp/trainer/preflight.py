"""Check settings, files and data of a job and read its inputs before process groups exist; checks raise UserError."""

import os
from collections.abc import Iterable, Iterator, Mapping
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
from grpo_mp.checkpoint.run_state import FINAL, check_run_folder, saved_step
from grpo_mp.config.data_sections import DataConfig
from grpo_mp.config.sections import (
    EngineConfig,
    LayoutConfig,
    ModelConfig,
    MonitorConfig,
    RolloutConfig,
    RunConfig,
    TrainingConfig,
)
from grpo_mp.data.prompts import PromptReader, PromptSet, load_eval_prompts, load_train_prompts
from grpo_mp.data.sets import DataSet, Item, overlap_warnings
from grpo_mp.data.template_date import use_template_date
from grpo_mp.distributed.coordinates import tp_size
from grpo_mp.distributed.layout import ModelShape
from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.tokenizer import read_tokenizer
from grpo_mp.models.weight_formats import BLOCKWISE_FP8, WeightFormat
from grpo_mp.monitor.loggers import MakeLogger, load_loggers
from grpo_mp.monitor.metrics import find_metric
from grpo_mp.policy.megatron_config import DTYPES
from grpo_mp.policy.policy import check_policy
from grpo_mp.rewards.code import check_row_tests
from grpo_mp.rewards.scorer import Scorer
from grpo_mp.rewards.settings import RewardConfig
from grpo_mp.rewards.teacher import TeacherClient, Teachers, check_served_tokens
from grpo_mp.rollout.engine_args import (
    check_arguments,
    check_sparse_attention,
    check_speculation,
    check_tool_parser,
)
from grpo_mp.rollout.engine_layout import (
    check_blocks,
    check_dtype,
    check_kernels,
    engine_format,
    engine_parallelism,
    engine_placements,
)
from grpo_mp.rollout.episodes import EpisodeParts, load_episode_parts
from grpo_mp.rollout.reward_servers import check_tokens
from grpo_mp.rollout.rollout import RolloutParts
from grpo_mp.rollout.routed_experts import check_routed_experts
from grpo_mp.rollout.sglang_source import argument_names
from grpo_mp.trainer.replay import ReplayedRollouts
from grpo_mp.utils.errors import UserError
from grpo_mp.weight_sync.wire import WireFormat

REQUEST_TOKENS = "rollout.max_prompt_tokens + max_response_tokens (of rollout and data.eval)"  # see max_request_tokens


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


@dataclass(frozen=True, kw_only=True)
class RunInputs(RolloutParts):
    """Inputs of a job, read before its process groups exist: model config, tokenizer, prompts, rewards."""

    train: PromptSet
    evals: dict[str, PromptSet]
    extensions: Extensions
    warnings: tuple[str, ...] = ()  # shown at the start
    replay: ReplayedRollouts | None = None  # None: engines generate


def read_model(
    model: ModelConfig, layout: LayoutConfig, training: TrainingConfig, trainers: int
) -> tuple[HfConfig, PreTrainedTokenizerBase]:
    """Read config and tokenizer of the policy; check it against the layout of `trainers` ranks, if any train."""
    hf = model.read_config()
    check_attention(hf, model.dtype, layout.context)
    if trainers > 0:
        check_policy(hf, model, layout=layout, training=training, world_size=trainers)
    return hf, read_tokenizer(model.path, hf, model.trust_remote_code)


def check_place(run: RunConfig, monitor: MonitorConfig, resolved: str) -> None:
    """Check guards and run folder. `resolved`: the settings as YAML."""
    check_guards(monitor.guards)
    check_run_folder(run.folder, resolved, run.resume == "auto")
    use_template_date(run.folder)


def check_attention(hf: HfConfig, dtype: str, context: int) -> None:
    """Check that the device can compute the model's attention with context parallelism."""
    if not platform.on_cuda() or context == 1:
        return
    if family_of(hf).config(hf).get("softmax_type", "vanilla") != "vanilla":
        raise UserError(
            f"layout.context={context}: TransformerEngine does not pass keys around a ring of GPUs (p2p) for the sinks "
            f"and sliding windows of {hf.model_type}: set layout.context=1"
        )
    if dtype == "float32":
        raise UserError(
            f"layout.context={context}: no attention kernel divides float32 sequences on a GPU: set "
            "model.dtype=bfloat16 or layout.context=1"
        )


def check_critic_tokenizer(path: Path | None, model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the folder of a critic has the policy's tokenizer, or none. `path`: None: the policy's folder."""
    if path and any((path / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        remedy = "take a critic of the policy's family and vocabulary"
        check_tokens(path, "critic.path", tokenizer=tokenizer, remedy=remedy, trust_remote_code=model.trust_remote_code)


def check_engines(
    engine: EngineConfig,
    hf: HfConfig,
    dtype: str,
    world_size: int,
    ranks_per_node: int,
    recorded: ModelShape | None = None,
) -> WeightFormat | None:
    """Check placement and arguments of the engines against the model; return the format of the engines' projections.

    `dtype`: model.dtype; `recorded`: see `recorded_shape`.
    """
    cpu = not platform.on_cuda()
    if cpu and hf.is_text_part:
        raise hf.error("engines on a CPU serve text models only, and this model has a vision tower: use GPUs")
    engine_placements(engine, world_size, ranks_per_node)
    check_arguments(engine.args)
    form = engine_format(engine.args, hf, cpu)
    check_dtype(dtype, engine.args, hf, form)
    check_sparse_attention(engine, hf, cpu)
    check_speculation(engine, hf, cpu)
    if not cpu:
        parallelism = engine_parallelism(engine.gpus_per_engine, engine.args, hf)
        if form:
            check_blocks(parallelism, hf, form)
            check_kernels(engine.args, form, platform.compute_capability())
    if recorded:
        check_routed_experts(engine.args, argument_names(), recorded)
    return form


def sent_formats(run: RunConfig, engines: WeightFormat | None) -> set[WeightFormat | None]:
    """Return the formats in which a run sends weights: to engines, and to exports, which use the same rounds."""
    exports = BLOCKWISE_FP8 if run.exports_fp8 else None
    return {engines, exports} if run.export or run.export_every else {engines}


def check_bucket(
    hf: HfConfig, dtype: str, layout: LayoutConfig, bucket_bytes: int | None, formats: Iterable[WeightFormat | None]
) -> None:
    """Check that `sync.bucket_bytes` holds each group of tensors that an engine must load together.

    `formats`: of engines and exports, which use the same rounds.
    """
    params = family_of(hf).params(hf)
    tp_sizes = {name: tp_size(param, layout) for name, param in params.items()}
    for form in set(formats):
        WireFormat(params, tp_sizes, DTYPES[dtype], form).round_bytes(bucket_bytes)


def replay_inputs(dump: Path, run: RunConfig, max_response_tokens: int) -> dict[str, Any]:
    """Return the fields of RunInputs for a replay; check that the dump is of another run, with the steps left."""
    if not run.steps:
        raise UserError("run.epochs: a replay reads no prompts to count: set run.steps")
    replay = ReplayedRollouts(dump, run.steps)
    if dump.resolve().is_relative_to(run.folder.resolve()):
        raise UserError(f"{dump} is of the run in {run.folder} itself: choose another run.folder")
    replay.check_steps(saved_step(run.folder) + 1)
    # Samples are not scored again, so files that `reward` names may be missing.
    scorer = Scorer(RewardConfig(answer=1.0), max_response_tokens)
    train = PromptSet(str(dump), ())
    return {"train": train, "evals": {}, "scorer": scorer, "replay": replay, "has_engines": False}


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


def data_warnings(train: DataSet[Item], evals: Mapping[str, DataSet[Item]]) -> Iterator[str]:
    """Yield sentences about rows that are left out, and about eval problems that are also in the train data."""
    for data in (train, *evals.values()):
        yield from data.warnings
    yield from overlap_warnings(train, evals)


def start_warnings(algorithm: AlgorithmConfig, rollout: RolloutConfig, precision: str | None) -> list[str]:
    """Return warnings if the samples' distribution is not what the loss assumes.

    `precision`: name of the low precision that engines compute in, if any.
    """
    warnings = list[str]()
    if algorithm.rollout_correction.kind != "none" or algorithm.old_logprobs != "recomputed":
        return warnings
    remedy = "set algorithm.rollout_correction={kind: truncate, high: 2.0}"
    if precision:
        warnings.append(
            f"engines compute in {precision} and algorithm.rollout_correction is none: samples come from other "
            f"probabilities than the policy's, and accuracy is known to drop: {remedy}"
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


def read_prompts(
    data: DataConfig,
    rollout: RolloutConfig,
    reward: RewardConfig,
    tokenizer: PreTrainedTokenizerBase,
    only_evals: bool,
    distillation: DistillationConfig | None = None,
) -> tuple[PromptSet, dict[str, PromptSet], EpisodeParts | None]:
    """Return train prompts, eval prompts by set, and the parts of episodes; None if a sample is a single answer.

    `only_evals`: the first eval set takes the place of the train prompts.
    """
    if rollout.tool_parser:
        check_tool_parser(rollout.tool_parser)
    episodes = load_episode_parts(rollout, tokenizer, data.chat_template_kwargs)
    tools = episodes.tools.schemas if episodes else ()
    if reward.episode and episodes and rollout.rollout_function == "call_tools" and not episodes.tools.rewards:
        raise UserError(
            "reward.episode is the weight of the reward that get_reward of a class in rollout.tools returns, and no "
            "class has the method get_reward: add the method, or set reward.episode=0"
        )
    check = partial(check_row_tests, reward, data.set_weights)
    reader = PromptReader(data, tokenizer, rollout.max_prompt_tokens, tools, check)
    demonstrations = distillation.demonstrations if distillation else None
    train = None if only_evals else load_train_prompts(reader, demonstrations)
    evals = load_eval_prompts(reader)
    return next(iter(evals.values())) if train is None else train, evals, episodes


def make_teachers(
    distillation: DistillationConfig | None, hf: HfConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[Teachers | None, list[str]]:
    """Return the teachers, None without distillation, and warnings; rank 0 tests teachers that have a URL."""
    if distillation is None:
        return None, []
    vocab_size = hf.int("vocab_size")
    clients = {
        name: TeacherClient(teacher, distillation.topk, vocab_size, name)
        for name, teacher in distillation.teachers.items()
    }
    warnings = list[str]()
    for name, client in clients.items():
        if not distillation.teachers[name].url or os.environ.get("RANK", "0") != "0":
            continue
        if unasked := check_served_tokens(client, tokenizer):
            warnings.append(unasked)
        else:
            client.check_reply()
    return Teachers(clients, distillation.names_by_set), warnings
