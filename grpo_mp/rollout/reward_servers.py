"""Servers of reward models and teachers on the job's devices; they free their device memory outside phase SCORE."""

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from grpo_mp import platform
from grpo_mp.checkpoint.hf_reader import has_hf_weights
from grpo_mp.config.sections import ModelConfig
from grpo_mp.distributed.process_groups import all_gather
from grpo_mp.models.tokenizer import load_tokenizer
from grpo_mp.rewards.reward_model import Server
from grpo_mp.rewards.settings import RewardConfig
from grpo_mp.rewards.teacher import SECTION, first_difference, is_teacher
from grpo_mp.rollout.client import EngineClient
from grpo_mp.rollout.engine_args import EngineSpec, check_arguments
from grpo_mp.rollout.hosted_engine import START_TIMEOUT_S
from grpo_mp.rollout.server import EngineProcess
from grpo_mp.rollout.sglang_source import model_classes
from grpo_mp.utils.background import EventLoopThread
from grpo_mp.utils.errors import UserError, one_line
from grpo_mp.utils.section import ServedModelConfig
from grpo_mp.utils.types import SampleGroup

Connect = Callable[[Sequence[Server]], None]
CAUSAL = ("ForCausalLM",)
HEADS = ("ForSequenceClassification", "ForRewardModel", "RewardModel")  # suffixes of SGLang classes with a reward head
GROUPS_IN_FLIGHT = 2  # groups of one rank at a server: one is computed while the other waits
MEMORY_TAGS = ("weights", "kv_cache", "cuda_graph")


class RewardServers:
    """Hosts one rank's servers of reward models and teachers, and scores the rank's groups on the node's servers."""

    def __init__(
        self,
        models: Mapping[str, ServedModelConfig],
        spec: EngineSpec,
        logs: Path,
        ranks_per_node: int,
        host_ranks: Sequence[int],
        request_timeout_s: float,
    ) -> None:
        """Assign servers to this rank without starting them.

        `models`: reward models and teachers by their names in the settings; `spec`: see `server_spec`;
        `logs`: folder; `host_ranks`: ranks that host engines.
        """
        self._models = models
        self._rank = rank = spec.rank
        self._host_ranks = host_ranks
        self._request_timeout_s = request_timeout_s
        self._node = range(rank // ranks_per_node * ranks_per_node, (rank // ranks_per_node + 1) * ranks_per_node)
        self._own = {
            name: EngineProcess(own, logs / f"{log_name(name)}_{own.index}.log", log_name(name))
            for name, model in models.items()
            if (own := server_spec(model, spec, has_head=not is_teacher(name)))
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
        own = dict[str, Server]()
        for name in self._models:
            if process := self._own.get(name):
                if platform.on_cuda():
                    process.start()
                process.wait_ready(START_TIMEOUT_S)
                client = EngineClient(process.spec.index, process.url, process.headers, self._request_timeout_s)
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
    def serves_teachers(self) -> bool:
        return any(map(is_teacher, self._models))

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


def served_models(
    reward: RewardConfig | None, teachers: Mapping[str, ServedModelConfig]
) -> dict[str, ServedModelConfig]:
    """Return the models that the job serves, by name: the reward models of `reward`, and the teachers with a folder."""
    own = reward.own_models if reward else {}
    return {**own, **{name: teacher for name, teacher in teachers.items() if teacher.folder}}


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
    return name if is_teacher(name) else f"reward_{name}"


def server_spec(model: ServedModelConfig, spec: EngineSpec, has_head: bool = True) -> EngineSpec | None:
    """Return the specification of the server that a rank hosts; None unless it is the first of the server's ranks.

    `spec`: that of an engine of the policy on one GPU of the rank; `has_head`: the server returns one score for a
    sequence; False: logprobs of its tokens.
    """
    assert model.folder
    if spec.rank % model.gpus_per_server:
        return None
    return replace(
        spec,
        index=spec.rank // model.gpus_per_server,
        model=model.folder,
        gpus=model.gpus_per_server,
        dummy_weights=False,
        args={
            **model.args,
            **({} if spec.cpu else {"enable_weights_cpu_backup": True}),
            **({"is_embedding": True} if has_head else spec.args),
        },
    )


def share_of(servers: Sequence[Server], index: int, hosts: int) -> Sequence[Server]:
    """Return the servers of a node that the `index`-th of its `hosts` engine hosts uses: several, or a shared one."""
    return servers[index::hosts] or [servers[index % len(servers)]]


def check_served_models(
    models: Mapping[str, ServedModelConfig],
    policy: ModelConfig,
    request_tokens: int,
    tokenizer: PreTrainedTokenizerBase,
    world_size: int,
    ranks_per_node: int,
) -> None:
    """Check that the folders of the reward models and teachers can be served and have the policy's tokenizer.

    `request_tokens`: length of the longest request.
    """
    for name, model in models.items():
        teaches = is_teacher(name)
        section = f"{SECTION}.{name}" if teaches else "reward.model"
        gpus = model.gpus_per_server
        if gpus < 1 or ranks_per_node % gpus or world_size % gpus:
            raise UserError(
                f"{section}.args.tp_size={gpus} does not divide the {ranks_per_node} ranks of a node "
                f"({world_size} in all): set a divisor"
            )
        check_arguments({name: value for name, value in model.args.items() if name != "tp_size"}, f"{section}.args")
        assert model.folder
        _check_folder(model.folder, f"{section}.path={model.folder}", teaches, request_tokens)
        remedy = f"take a {'teacher' if teaches else 'reward model'} of the same family"
        trust = policy.trust_remote_code
        check_tokens(model.folder, f"{section}.path", tokenizer, remedy=remedy, trust_remote_code=trust)


def _check_folder(folder: Path, where: str, is_teacher: bool, request_tokens: int) -> None:
    """Check that a folder has weights, a class and positions for a teacher, or for a reward model.

    `where`: the setting, for errors.
    """
    try:
        config = dict(json.loads((folder / "config.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{where}: no Hugging Face folder with a config.json ({one_line(error, 200)})") from error
    (architecture,) = (config.get("architectures") or [""])[:1]
    endings, kind = (CAUSAL, "causal language model") if is_teacher else (HEADS, "model with a reward head")
    problem = None
    if not str(architecture).endswith(endings):
        problem = f"{architecture or 'its config.json'} names no {kind} (one that ends in {', '.join(endings)})"
    elif architecture not in served_architectures():
        problem = f"the installed SGLang does not serve {architecture}: take another model"
    elif request_tokens > int(config.get("max_position_embeddings") or request_tokens):
        problem = (
            f"it has {config['max_position_embeddings']} positions, and a prompt with its response up to "
            f"{request_tokens}: lower rollout.max_response_tokens"
        )
    elif not has_hf_weights(folder):
        problem = "it has no weights in Hugging Face's format (safetensors): save them so"
    elif not is_teacher:
        labels = config.get("num_labels", len(config.get("id2label") or {}) or 2)
        if labels != 1 and not architecture.endswith("RewardModel"):
            problem = f"it has {labels} labels, and a reward is one number: take a model with one label"
    if problem:
        raise UserError(f"{where}: {problem}")


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
