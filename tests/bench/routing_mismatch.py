"""Mismatch of engine and policy in bfloat16 and float16, without and with R3: `python -m tests.bench.routing_mismatch`.

A random model of each kind of router generates with a real engine; the policy, which holds the same weights, computes
the logprobs of the responses twice: its routers choose, or take the experts that the engine chose.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from grpo_mp.config import Settings, check_settings
from grpo_mp.distributed.layout import ModelShape, model_shape
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.policy.policy import Policy
from grpo_mp.rollout.client import EngineClient, EngineOutput, SamplingParams
from grpo_mp.rollout.engine_args import EngineSpec
from grpo_mp.rollout.groups import make_samples
from grpo_mp.rollout.routed_experts import ARGUMENT
from grpo_mp.utils.types import MicroBatch, Prompt, SampleGroup
from tests.engines import started_engine
from tests.one_rank import one_rank_job
from tests.trainer.one_step import make_batch
from tools.tiny.models import make_tiny, make_tokenizer

DTYPES = ("bfloat16", "float16")
FAMILIES = ("qwen3_moe", "deepseek_v2", "deepseek_v3", "glm4_moe")
SHAPE = {"num_hidden_layers": 6, "hidden_size": 64, "initializer_range": 0.1}
PROMPTS = 24
RESPONSES = 4
TOKENS = 48
LIMIT_S = 300.0


@dataclass(frozen=True)
class Mismatch:
    """Of the policy to the engine, over all response tokens; `differing`: experts that the policy did not use."""

    differing: float
    mean: float
    largest: float
    kl: float

    def __str__(self) -> str:
        return (
            f"differing experts {self.differing:8.3%}   mean |difference| {self.mean:.5f}   "
            f"largest {self.largest:.4f}   KL {self.kl:.2e}"
        )


def main() -> None:
    for family, dtype in product(FAMILIES, DTYPES):
        plain, replayed = measure(family, dtype)
        print(f"{family:12s} {dtype:8s} none  {plain}")
        print(f"{'':12s} {'':8s} R3    {replayed}   ({plain.kl / replayed.kl:.1f} times less KL)", flush=True)


def measure(family: str, dtype: str = "bfloat16") -> tuple[Mismatch, Mismatch]:
    """Return the mismatch without and with replay."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        make_tiny(folder, family, make_tokenizer(["apples"]), 1, **SHAPE)
        groups = generate(folder, model_shape(HfConfig.read(folder)), dtype)
        with one_rank_job() as parallel:
            settings = make_settings(folder, dtype)
            policy = Policy(settings, parallel, with_reference=False)
            (update,) = make_batch(settings, parallel, groups, moe_layers=policy.moe_layers).updates
            return compare(policy, update, replays=False), compare(policy, update, replays=True)


def make_settings(folder: Path, dtype: str) -> Settings:
    tree = {
        "run": {"folder": "unused", "steps": 1},
        "model": {"path": str(folder), "dtype": dtype},
        "data": {"train": "unused"},
        "rollout": {
            "prompts_per_step": PROMPTS,
            "group_size": RESPONSES,
            "max_prompt_tokens": PROMPTS,
            "max_response_tokens": TOKENS,
        },
        "reward": {"boxed": 1.0},
        "optimizer": {"lr": 0.001},
        "training": {"router_replay": "R3"},
    }
    return check_settings(tree, "routing_mismatch")


def generate(folder: Path, shape: ModelShape, dtype: str) -> list[SampleGroup]:
    prompts = [Prompt(i, "", tuple(range(5 + i, 15 + 2 * i))) for i in range(PROMPTS)]

    async def request(url: str, headers: dict[str, str]) -> list[list[EngineOutput]]:
        sampling = SamplingParams(TOKENS, ignore_eos=True)
        async with aclosing(EngineClient(0, url, headers, LIMIT_S)) as client:
            return await asyncio.gather(*(client.generate(p.tokens, sampling, RESPONSES, shape) for p in prompts))

    args = {ARGUMENT: True}
    spec = EngineSpec(index=0, rank=0, model=folder, dtype=dtype, context_tokens=160, cpu=True, args=args)
    with started_engine(spec, folder.parent / "engine.log") as engine:
        engine.wait_ready(LIMIT_S)
        outputs = asyncio.run(request(engine.url, engine.headers))
    pairs = zip(prompts, outputs, strict=True)
    return [SampleGroup(p, make_samples(p, of_prompt, [""] * len(of_prompt), p.index)) for p, of_prompt in pairs]


def compare(policy: Policy, update: Sequence[MicroBatch], replays: bool) -> Mismatch:
    """Compare logprobs, and the experts that the policy's routers use, with the engine's."""
    batches = [batch if replays else MicroBatch(**vars(batch) | {"routed_experts": None}) for batch in update]
    used: list[Tensor] = []
    routers = [
        module for model in policy.models() for module in model.modules() if type(module).__name__ == "TopKRouter"
    ]
    hooks = [router.register_forward_hook(lambda _, __, output: used.append(output[1])) for router in routers]
    outputs = policy.logprobs(batches)
    for hook in hooks:
        hook.remove()
    differing = chosen = 0
    for number, batch in enumerate(update):
        assert batch.routed_experts
        rows = batch.routed_experts.rows.long()
        experts = batch.routed_experts.ids.long()
        for layer, routing_map in enumerate(used[number * len(routers) : (number + 1) * len(routers)]):
            differing += int((~routing_map[rows].gather(1, experts[:, layer])).sum())
            chosen += experts[:, layer].numel()
    pairs = list(zip(update, outputs, strict=True))
    ours = torch.cat([output[0][batch.mask.bool()] for batch, output in pairs]).double()
    theirs = torch.cat([batch.rollout_logprobs[batch.mask.bool()] for batch, _ in pairs]).double()
    apart = ours - theirs
    kl = float((apart.exp() - 1 - apart).mean())
    return Mismatch(differing / chosen, float(apart.abs().mean()), float(apart.abs().max()), kl)


if __name__ == "__main__":
    main()
