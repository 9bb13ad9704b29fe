"""Servers of reward models and of a teacher that the job itself starts on its ranks' devices: asleep but in SCORE."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from grpo_mp import platform
from grpo_mp.checkpoint.hf_reader import HfReader, check_model, has_hf_weights
from grpo_mp.config import Settings
from grpo_mp.distributed.process_groups import all_gather
from grpo_mp.models.families import known_params
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.tokenizer import load_tokenizer
from grpo_mp.models.value_head import VALUE_HEAD, check_head, reward_head
from grpo_mp.rewards.reward_model import Server
from grpo_mp.rewards.teacher import SECTION, first_difference
from grpo_mp.rollout.client import EngineClient
from grpo_mp.rollout.engine_args import FP32_HEAD, EngineSpec, check_arguments
from grpo_mp.rollout.server import EngineProcess
from grpo_mp.rollout.sglang_source import model_classes
from grpo_mp.utils.background import EventLoopThread
from grpo_mp.utils.errors import UserError, one_line
from grpo_mp.utils.section import ServedModelConfig
from grpo_mp.utils.types import SampleGroup

Connect = Callable[[Sequence[Server]], None]
TEACHER = "teacher"
CAUSAL = ("ForCausalLM",)
HEADS = ("ForSequenceClassification", "ForRewardModel", "RewardModel")  # how SGLang's classes with a reward head end
GROUPS_IN_FLIGHT = 2  # at a server from one rank: one is computed while the next one waits
MEMORY_TAGS = ("weights", "kv_cache", "cuda_graph")


class RewardServers:
    """The servers as one rank sees them: those that it hosts, and those that score its groups."""

    def __init__(
        self,
        settings: Settings,
        models: Mapping[str, ServedModelConfig],
        rank: int,
        ranks_per_node: int,
        host_ranks: Sequence[int],
    ) -> None:
        """Place the servers; nothing is started.

        `models`: those with a folder, reward models by their names in the reward, the teacher as TEACHER.
        `host_ranks`: of the policy's engines.
        """
        self._models = models
        self._settings, self._rank, self._host_ranks = settings, rank, host_ranks
        self._node = range(rank // ranks_per_node * ranks_per_node, (rank // ranks_per_node + 1) * ranks_per_node)
        self._own = {
            name: EngineProcess(
                spec, settings.run.folder / "logs" / f"{log_name(name)}_{spec.index}.log", log_name(name)
            )
            for name, model in models.items()
            if (spec := server_spec(settings, model, rank, not platform.on_cuda(), has_head=name != TEACHER))
        }
        self._clients: list[EngineClient] = []
        self._servers = 0  # that score this rank's groups
        self._loop = EventLoopThread(f"reward servers of rank {rank}")

    def launch(self) -> None:
        """Start this rank's servers beside the engines and return at once. On GPUs `open` does, in turn."""
        if not platform.on_cuda():  # there a start measures the free memory
            for process in self._own.values():
                process.start()

    def open(self, connect: Mapping[str, Connect], group: dist.ProcessGroup, sleeps: bool) -> None:
        """Wait until all servers of the job answer, and let each model's client know those of this rank's groups.

        Every rank must call this. `sleeps`: they free the device. Raises EngineError where one does not come up.
        """
        engine, own = self._settings.engine, dict[str, Server]()
        for name in self._models:
            if process := self._own.get(name):
                if platform.on_cuda():
                    process.start()
                process.wait_ready(engine.start_timeout_s)
                client = EngineClient(process.spec.index, process.url, process.headers, engine.request_timeout_s)
                self._clients.append(client)
                if sleeps:
                    self._loop.run(client.release_memory(MEMORY_TAGS))
                own[name] = Server(process.url, process.headers)
            dist.barrier(group=group)  # the next model's servers may be on the same devices
        self._connect(connect, all_gather(own, group))  # keys stay in the job

    def _connect(self, connect: Mapping[str, Connect], by_rank: Sequence[Mapping[str, Server]]) -> None:
        if self._rank in self._host_ranks:
            hosts = [rank for rank in self._host_ranks if rank in self._node]
            for name in self._models:
                servers = [by_rank[rank][name] for rank in self._node if name in by_rank[rank]]
                share = share_of(servers, hosts.index(self._rank), len(hosts))
                self._servers = max(self._servers, len(share))
                connect[name](share)

    @property
    def serves_teacher(self) -> bool:
        """Return whether the teacher is one of the models."""
        return TEACHER in self._models

    def move(self, onload: bool) -> None:
        """Take or free the device memory of this rank's servers; meanwhile their weights are on the host."""
        for client in self._clients:
            self._loop.run((client.resume_memory if onload else client.release_memory)(MEMORY_TAGS))

    def score(self, groups: Sequence[SampleGroup], finish: Callable[[SampleGroup], SampleGroup]) -> list[SampleGroup]:
        """Finish groups, a few at a time. Raises UserError with a server's last lines where it has ended."""
        self._check_alive()
        try:
            return score_groups(groups, finish, GROUPS_IN_FLIGHT * max(1, self._servers))
        except UserError:
            self._check_alive()  # its log says more
            raise

    def _check_alive(self) -> None:
        for process in self._own.values():
            process.check_alive("while it was to score a step")

    def stop(self) -> None:
        """End this rank's servers."""
        for process in self._own.values():
            process.stop()
        for client in self._clients:
            self._loop.run(client.aclose())
        self._clients = []
        self._loop.close()


def served_models(settings: Settings, rewards: bool, teacher: bool) -> dict[str, ServedModelConfig]:
    """Return the models with a folder that a job serves, by name: those of the reward, and TEACHER."""
    models: dict[str, ServedModelConfig] = {**settings.reward.own_models} if rewards else {}
    distillation = settings.algorithm.distillation
    if teacher and distillation and distillation.teacher.folder:
        models[TEACHER] = distillation.teacher
    return models


def score_groups(
    groups: Sequence[SampleGroup], finish: Callable[[SampleGroup], SampleGroup], in_flight: int
) -> list[SampleGroup]:
    """Finish groups, so many at a time; where one fails, those that wait are not asked about."""
    with ThreadPoolExecutor(in_flight) as pool:
        try:
            return list(pool.map(finish, groups))
        except UserError:
            pool.shutdown(cancel_futures=True)
            raise


def log_name(name: str) -> str:
    """Return how the log files of a model's servers begin."""
    return name if name == TEACHER else f"reward_{name}"


def server_spec(
    settings: Settings, model: ServedModelConfig, rank: int, cpu: bool, has_head: bool = True
) -> EngineSpec | None:
    """Describe the server that a rank hosts: the first of `gpus_per_server` does; None for the others.

    `has_head`: it gives one score for a sequence, else logprobs.
    """
    assert model.folder
    if rank % model.gpus_per_server:
        return None
    asleep = {} if cpu else {"enable_weights_cpu_backup": True}
    output = {"is_embedding": True} if has_head else {FP32_HEAD: settings.model.fp32_head}
    return EngineSpec(
        index=rank // model.gpus_per_server,
        rank=rank,
        model=model.folder,
        dtype=settings.model.dtype,
        context_tokens=settings.max_request_tokens,
        seed=settings.run.seed,
        gpus=model.gpus_per_server,
        cpu=cpu,
        trust_remote_code=settings.model.trust_remote_code,
        first_gpu=0 if cpu else int(os.environ.get("LOCAL_RANK", 0)),
        args={**model.args, **asleep, **output},
    )


def share_of(servers: Sequence[Server], index: int, hosts: int) -> Sequence[Server]:
    """Return the servers of a node that host `index` of so many uses: some for itself, or one with others."""
    return servers[index::hosts] or [servers[index % len(servers)]]


def check_reward_models(
    settings: Settings, tokenizer: PreTrainedTokenizerBase, world_size: int, ranks_per_node: int
) -> None:
    """Raise UserError for a folder that cannot be served as a reward model, or servers that do not divide the ranks."""
    for name, model in settings.reward.own_models.items():
        where = f"reward.{name}"
        config = check_served_model(
            settings,
            model,
            section=where,
            read_config=read_reward_config,
            world_size=world_size,
            ranks_per_node=ranks_per_node,
        )
        check_weights(config, where, has_head=True)
        assert model.folder
        remedy = "take a reward model of the same family, or score texts by reward.functions"
        check_tokens(
            model.folder,
            f"{where}.folder",
            tokenizer=tokenizer,
            remedy=remedy,
            trust_remote_code=settings.model.trust_remote_code,
        )


def check_teacher(settings: Settings, tokenizer: PreTrainedTokenizerBase, world_size: int, ranks_per_node: int) -> None:
    """Raise UserError for a folder that cannot be served as a teacher of the policy's tokens."""
    distillation = settings.algorithm.distillation
    if distillation and distillation.teacher.folder:
        teacher = distillation.teacher
        config = check_served_model(
            settings,
            teacher,
            section=SECTION,
            read_config=read_teacher_config,
            world_size=world_size,
            ranks_per_node=ranks_per_node,
        )
        check_weights(config, SECTION, has_head=False)
        remedy, trust = "take a teacher of the same family", settings.model.trust_remote_code
        check_tokens(
            distillation.teacher.folder,
            f"{SECTION}.folder",
            tokenizer=tokenizer,
            remedy=remedy,
            trust_remote_code=trust,
        )


def check_served_model(
    settings: Settings,
    model: ServedModelConfig,
    section: str,
    read_config: Callable[[Path, str], HfConfig],
    world_size: int,
    ranks_per_node: int,
) -> HfConfig:
    """Return the folder's config.

    Raises UserError where its servers do not divide the ranks, or cannot hold its model or the sequences.
    """
    assert model.folder
    where, gpus = f"{section}.folder={model.folder}", model.gpus_per_server
    if ranks_per_node % gpus or world_size % gpus:
        raise UserError(
            f"{section}.gpus_per_server={gpus} does not divide the {ranks_per_node} ranks of a node "
            f"({world_size} in all): set a divisor"
        )
    check_arguments(model.args, f"{section}.args")
    config = read_config(model.folder, where)
    heads, positions = int(config.get("num_attention_heads", gpus)), config.get("max_position_embeddings")
    if heads % gpus:
        raise UserError(f"{where}: {gpus} GPUs of a server do not divide its {heads} attention heads: use fewer")
    if positions and int(positions) < settings.max_request_tokens:
        raise UserError(
            f"{where}: it has {positions} positions, and a prompt with its response up to "
            f"{settings.max_request_tokens}: lower rollout.max_response_tokens"
        )
    return config


def check_weights(hf: HfConfig, section: str, has_head: bool) -> None:
    """Raise UserError where a folder lacks weights of its model, which SGLang would leave random without a word.

    Of a reward model (`has_head`) the head is looked for, and of both all tensors where the family is known.
    """
    where, architecture = f"{section}.folder={hf.path}", str(hf.values["architectures"][0])
    if not has_hf_weights(hf.path):
        raise UserError(
            f"{where}: it has no weights in Hugging Face's format (safetensors): save them so, or run grpo-mp convert "
            "on its checkpoint"
        )
    ending = next(ending for ending in (*CAUSAL, *HEADS) if architecture.endswith(ending))
    params = known_params(hf, architecture.removesuffix(ending) + CAUSAL[0])
    others = ["lm_head.weight"]
    with HfReader(hf.path) as reader:
        if has_head:
            params.pop(VALUE_HEAD, None)
            head = reward_head(architecture, hf.int("hidden_size"))
            if head is None:
                raise UserError(
                    f"{where}: which weights the head of {architecture} has is not known here, so that a folder "
                    "without one would pass: take a sequence classifier with one label"
                )
            remedy = "take a whole reward model, since SGLang would score by a random head"
            check_head(reader.names, reader.shape, head=head, where=where, architecture=architecture, remedy=remedy)
            others += head
        if params:
            try:
                check_model(reader, params.values(), hf, others)
            except UserError as error:
                raise UserError(f"{section}: {error}") from error


def check_tokens(
    folder: Path, setting: str, tokenizer: PreTrainedTokenizerBase, remedy: str, trust_remote_code: bool
) -> None:
    """Raise UserError where the folder that `setting` names has no readable tokenizer, or other tokens than the policy.

    The folder's model gets the policy's tokens as numbers.
    """
    try:
        vocabulary = load_tokenizer(folder, trust_remote_code).get_vocab()
    except UserError as error:
        raise UserError(f"{setting}: {error}") from error
    if difference := first_difference(tokenizer.get_vocab(), vocabulary):
        raise UserError(
            f"{setting}={folder}: its tokenizer is another than the policy's, and it would be sent the policy's tokens "
            f"({difference}): {remedy}"
        )


def read_teacher_config(folder: Path, where: str) -> HfConfig:
    """Return the config of a causal language model. Raises UserError where SGLang cannot serve the folder as one."""
    config, name = _read_config(
        folder, where, endings=CAUSAL, kind="causal language model", remedy="take the folder of one"
    )
    _check_served(name, where, "teacher")
    return config


def read_reward_config(folder: Path, where: str) -> HfConfig:
    """Return the config of a reward model. Raises UserError where the folder has none that SGLang can serve."""
    remedy = "take a sequence classifier with one label"
    config, name = _read_config(folder, where, endings=HEADS, kind="model with a reward head", remedy=remedy)
    labels = config.get("num_labels", len(config.get("id2label") or {}) or 2)
    if labels != 1 and not name.endswith("RewardModel"):
        raise UserError(f"{where}: it has {labels} labels, and a reward is one number: take a model with one label")
    _check_served(name, where, "reward model")
    return config


def _read_config(folder: Path, where: str, endings: tuple[str, ...], kind: str, remedy: str) -> tuple[HfConfig, str]:
    """Return a folder's config and the class that it names first, which SGLang takes where it has it.

    Raises UserError where the class has none of the endings.
    """
    try:
        config = dict(json.loads((folder / "config.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{where}: no Hugging Face folder with a config.json ({one_line(error, 200)})") from error
    listed = config.get("architectures")
    names = [str(name) for name in listed] if isinstance(listed, list) else []
    if not names or not names[0].endswith(endings):
        raise UserError(
            f"{where}: {', '.join(names) or 'its config.json'} names no {kind} (one that ends in "
            f"{', '.join(endings)}): {remedy}"
        )
    return HfConfig(folder, config), names[0]


def _check_served(name: str, where: str, kind: str) -> None:
    if name not in served_architectures():
        raise UserError(f"{where}: the installed SGLang does not serve {name}: take another {kind}")


def served_architectures() -> frozenset[str]:
    """Return the classes of the installed SGLang's models. Raises UserError where it is not installed."""
    return frozenset[str]().union(*model_classes().values())
