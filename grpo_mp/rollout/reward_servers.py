"""Servers of reward models and a teacher on the job's devices; they free their device memory outside phase SCORE."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from grpo_mp import platform
from grpo_mp.checkpoint.hf_reader import has_hf_weights
from grpo_mp.config import Settings
from grpo_mp.distributed.process_groups import all_gather
from grpo_mp.models.tokenizer import load_tokenizer
from grpo_mp.rewards.reward_model import Server
from grpo_mp.rewards.teacher import SECTION, first_difference
from grpo_mp.rollout.client import EngineClient
from grpo_mp.rollout.engine_args import FP32_HEAD, EngineSpec, check_arguments
from grpo_mp.rollout.hosted_engine import START_TIMEOUT_S
from grpo_mp.rollout.server import EngineProcess
from grpo_mp.rollout.sglang_source import model_classes
from grpo_mp.utils.background import EventLoopThread
from grpo_mp.utils.errors import UserError, one_line
from grpo_mp.utils.section import ServedModelConfig
from grpo_mp.utils.types import SampleGroup

Connect = Callable[[Sequence[Server]], None]
TEACHER = "teacher"
CAUSAL = ("ForCausalLM",)
HEADS = ("ForSequenceClassification", "ForRewardModel", "RewardModel")  # suffixes of SGLang classes with a reward head
GROUPS_IN_FLIGHT = 2  # groups of one rank at a server: one is computed while the other waits
MEMORY_TAGS = ("weights", "kv_cache", "cuda_graph")


class RewardServers:
    """Hosts one rank's servers of reward models and teacher, and scores the rank's groups on the node's servers."""

    def __init__(
        self,
        settings: Settings,
        models: Mapping[str, ServedModelConfig],
        rank: int,
        ranks_per_node: int,
        host_ranks: Sequence[int],
    ) -> None:
        """Assign servers to this rank without starting them.

        `models`: reward models by their names in the settings, and the teacher as TEACHER; `host_ranks`: ranks that
        host engines.
        """
        self._models = models
        self._settings = settings
        self._rank = rank
        self._host_ranks = host_ranks
        self._node = range(rank // ranks_per_node * ranks_per_node, (rank // ranks_per_node + 1) * ranks_per_node)
        self._own = {
            name: EngineProcess(
                spec, settings.run.folder / "logs" / f"{log_name(name)}_{spec.index}.log", log_name(name)
            )
            for name, model in models.items()
            if (spec := server_spec(settings, model, rank, not platform.on_cuda(), has_head=name != TEACHER))
        }
        self._clients: list[EngineClient] = []
        self._servers = 0  # number of servers that score this rank's groups
        self._loop = EventLoopThread(f"reward servers of rank {rank}")

    def launch(self) -> None:
        """Start this rank's servers on CPUs without waiting; on GPUs `open` starts them one after the other."""
        if not platform.on_cuda():  # SGLang measures the free GPU memory while it starts
            for process in self._own.values():
                process.start()

    def open(self, connect: Mapping[str, Connect], group: dist.ProcessGroup, sleeps: bool) -> None:
        """Wait until all servers of the job answer, and pass this rank its servers of each model.

        `connect`: callback of each model that takes the servers; `sleeps`: the servers then free their device memory.
        """
        limit_s, own = self._settings.rollout.group_timeout_s, dict[str, Server]()
        for name in self._models:
            if process := self._own.get(name):
                if platform.on_cuda():
                    process.start()
                process.wait_ready(START_TIMEOUT_S)
                client = EngineClient(process.spec.index, process.url, process.headers, limit_s)
                self._clients.append(client)
                if sleeps:
                    self._loop.run(client.release_memory(MEMORY_TAGS))
                own[name] = Server(process.url, process.headers)
            dist.barrier(group=group)  # the next model's servers may start on the same devices
        self._connect(connect, all_gather(own, group))  # API keys are exchanged only among the job's ranks

    def _connect(self, connect: Mapping[str, Connect], by_rank: Sequence[Mapping[str, Server]]) -> None:
        """On an engine host, pass each model's client this host's share of the node's servers."""
        if self._rank in self._host_ranks:
            hosts = [rank for rank in self._host_ranks if rank in self._node]
            for name in self._models:
                servers = [by_rank[rank][name] for rank in self._node if name in by_rank[rank]]
                share = share_of(servers, hosts.index(self._rank), len(hosts))
                self._servers = max(self._servers, len(share))
                connect[name](share)

    @property
    def serves_teacher(self) -> bool:
        return TEACHER in self._models

    def move(self, onload: bool) -> None:
        """Load this rank's servers onto the device (`onload`), or free their device memory."""
        for client in self._clients:
            self._loop.run((client.resume_memory if onload else client.release_memory)(MEMORY_TAGS))

    def score(self, groups: Sequence[SampleGroup], finish: Callable[[SampleGroup], SampleGroup]) -> list[SampleGroup]:
        """Return `finish` of each group, a few groups at a time. A server that ended raises an error with its log."""
        self._check_alive()
        try:
            return score_groups(groups, finish, GROUPS_IN_FLIGHT * max(1, self._servers))
        except UserError:
            self._check_alive()  # an ended server's log explains more than the failed request
            raise

    def _check_alive(self) -> None:
        for process in self._own.values():
            process.check_alive("while it was to score a step")

    def stop(self) -> None:
        """Stop this rank's servers and close the connections."""
        for process in self._own.values():
            process.stop()
        for client in self._clients:
            self._loop.run(client.aclose())
        self._clients = []
        self._loop.close()


def served_models(settings: Settings, rewards: bool, teacher: bool) -> dict[str, ServedModelConfig]:
    """Return the models that the job serves: reward models by name if `rewards`, and TEACHER if `teacher`."""
    models: dict[str, ServedModelConfig] = {**settings.reward.own_models} if rewards else {}
    distillation = settings.algorithm.distillation
    if teacher and distillation and distillation.teacher.folder:
        models[TEACHER] = distillation.teacher
    return models


def score_groups(
    groups: Sequence[SampleGroup], finish: Callable[[SampleGroup], SampleGroup], in_flight: int
) -> list[SampleGroup]:
    """Return `finish` of each group, `in_flight` groups at a time; after an error skip the waiting groups."""
    with ThreadPoolExecutor(in_flight) as pool:
        try:
            return list(pool.map(finish, groups))
        except UserError:
            pool.shutdown(cancel_futures=True)
            raise


def log_name(name: str) -> str:
    """Return the prefix of the log file names of a model's servers."""
    return name if name == TEACHER else f"reward_{name}"


def server_spec(
    settings: Settings, model: ServedModelConfig, rank: int, cpu: bool, has_head: bool = True
) -> EngineSpec | None:
    """Return the specification of the server that a rank hosts; None unless it is the first of the server's ranks.

    `has_head`: the server returns one score for a sequence; False: logprobs of its tokens.
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
    """Return the servers of a node that the `index`-th of its `hosts` engine hosts uses: several, or a shared one."""
    return servers[index::hosts] or [servers[index % len(servers)]]


def check_served_models(
    settings: Settings, tokenizer: PreTrainedTokenizerBase, world_size: int, ranks_per_node: int, teacher: bool = True
) -> None:
    """Check that the folders of the reward models and the teacher can be served and have the policy's tokenizer."""
    trust = settings.model.trust_remote_code
    for name, model in served_models(settings, rewards=True, teacher=teacher).items():
        section, gpus = SECTION if name == TEACHER else "reward.model", model.gpus_per_server
        if gpus < 1 or ranks_per_node % gpus or world_size % gpus:
            raise UserError(
                f"{section}.args.tp_size={gpus} does not divide the {ranks_per_node} ranks of a node "
                f"({world_size} in all): set a divisor"
            )
        check_arguments({name: value for name, value in model.args.items() if name != "tp_size"}, f"{section}.args")
        assert model.folder
        _check_folder(model.folder, f"{section}.path={model.folder}", name == TEACHER, settings.max_request_tokens)
        kind = "teacher" if name == TEACHER else "reward model"
        remedy = f"take a {kind} of the same family"
        check_tokens(model.folder, f"{section}.path", tokenizer, remedy=remedy, trust_remote_code=trust)


def _check_folder(folder: Path, where: str, is_teacher: bool, request_tokens: int) -> None:
    """Check that SGLang can serve the model of a folder as a teacher, or as a reward model.

    `where`: the setting, for errors; `request_tokens`: length of the longest request.
    """
    try:
        config = dict(json.loads((folder / "config.json").read_text()))
        names = [str(name) for name in config.get("architectures") or ()]
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{where}: no Hugging Face folder with a config.json ({one_line(error, 200)})") from error
    endings, kind = (CAUSAL, "causal language model") if is_teacher else (HEADS, "model with a reward head")
    if not (names and names[0].endswith(endings)):
        raise UserError(
            f"{where}: {', '.join(names) or 'its config.json'} names no {kind} (one that ends in {', '.join(endings)})"
        )
    if names[0] not in served_architectures():
        raise UserError(f"{where}: the installed SGLang does not serve {names[0]}: take another model")
    labels = config.get("num_labels", len(config.get("id2label") or {}) or 2)
    if not is_teacher and labels != 1 and not names[0].endswith("RewardModel"):
        raise UserError(f"{where}: it has {labels} labels, and a reward is one number: take a model with one label")
    if request_tokens > int(config.get("max_position_embeddings") or request_tokens):
        raise UserError(
            f"{where}: it has {config['max_position_embeddings']} positions, and a prompt with its response up to "
            f"{request_tokens}: lower rollout.max_response_tokens"
        )
    if not has_hf_weights(folder):
        raise UserError(
            f"{where}: it has no weights in Hugging Face's format (safetensors): save them so, or run grpo-mp convert "
            "on its checkpoint"
        )


def check_tokens(
    folder: Path, setting: str, tokenizer: PreTrainedTokenizerBase, remedy: str, trust_remote_code: bool
) -> None:
    """Check that the tokenizer of a folder has the policy's vocabulary, since its model is sent the policy's token ids.

    `setting`: the setting that names the folder, for errors.
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


def served_architectures() -> frozenset[str]:
    """Return the names of the model classes in the installed SGLang."""
    return frozenset[str]().union(*model_classes().values())
