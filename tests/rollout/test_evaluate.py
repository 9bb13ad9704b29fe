"""Prompts of an eval set on an engine of the test's own: one that takes too long is a wrong answer."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch.distributed as dist
from transformers import AutoTokenizer

from grpo_mp.batching.exchange import sample_infos
from grpo_mp.batching.group_selection import AdmissionRule
from grpo_mp.config import load_settings
from grpo_mp.distributed.process_groups import Job
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.monitor.evaluation import score_eval_set
from grpo_mp.rewards.scorer import Scorer
from grpo_mp.rollout.client import EngineOutput
from grpo_mp.rollout.rollout import Rollout, RolloutParts, base_spec
from grpo_mp.rollout.stream import GroupStream
from grpo_mp.utils.types import Prompt
from tests.conftest import TinyRun
from tests.rollout.fake_engine import FakeEngine

SLOW = 2


class RightEngine(FakeEngine):
    """All its answers are right, and one never comes."""

    async def generate(self, prompt_tokens: Sequence[int], *given: Any, **more: Any) -> list[EngineOutput]:
        if prompt_tokens[0] == SLOW:
            raise TimeoutError
        return await super().generate(prompt_tokens, *given, **more)


class LongEngine(FakeEngine):
    """All its answers have 12 tokens."""

    async def generate(self, *given: Any, **more: Any) -> list[EngineOutput]:
        outputs = await super().generate(*given, **more)
        return [replace(one, tokens=(6,) * 12, logprobs=(-1.0,) * 12, weight_versions=(0,) * 12) for one in outputs]


def evaluate(tiny_run: TinyRun, overrides: Sequence[str], engine: FakeEngine, count: int) -> Any:
    """The groups of prompts whose right answer the engine gives, and the counts of their rewards."""
    settings = load_settings(tiny_run.config, overrides)
    tokenizer: Any = AutoTokenizer.from_pretrained(str(tiny_run.model))
    tokenizer.batch_decode = lambda tokens, **_: ["\\boxed{7}" for _ in tokens]
    scorer = Scorer(settings.reward, settings.rollout.max_response_tokens)
    parts = RolloutParts(hf=HfConfig.read(tiny_run.model), tokenizer=tokenizer, scorer=scorer)
    base = base_spec(settings.model, 64, seed=0, rank=0)
    job = SimpleNamespace(rank=0, world_size=1, ranks_per_node=1)
    with Rollout(parts, settings.engine, settings.rollout, base, cast("Job", job), logs=tiny_run.folder) as rollout:
        host: Any = SimpleNamespace(client=engine, lose=print, stop=lambda: None)
        rollout.engine = host
        prompts = [Prompt(number, "?", (number,), answer="7") for number in range(count)]
        stream = GroupStream(dist.HashStore(), "eval", AdmissionRule(count, count, count))
        return rollout.evaluate(prompts, settings.eval_sets["arithmetic"], "arithmetic", 0, stream=stream)


def test_a_group_past_its_limit_counts_as_wrong_answers(tiny_run: TinyRun) -> None:
    groups, _ = evaluate(tiny_run, ["data.eval.arithmetic.samples=3"], RightEngine(), 4)
    assert [group.prompt.index for group in groups] == [0, 1, 2, 3]
    score = score_eval_set([info for group in groups for info in sample_infos(group)])
    assert (score.accuracy, score.unanswered, score.problems, score.samples) == (0.75, 3, 4, 3)
    (sample, *_) = groups[SLOW].samples
    assert (sample.text, sample.is_correct, sample.error) == ("", False, "it took longer than rollout.group_timeout_s")


def test_terms_of_the_length_know_the_limit_of_their_set(tiny_run: TinyRun) -> None:
    """A right answer of 12 tokens is too long in a rollout of 16, and short in a set whose limit is 64."""
    reward = ["reward.answer=1", "reward.overlong={weight: 1.0, buffer_tokens: 8}"]
    overrides = [*reward, "data.eval.arithmetic.samples=1", "rollout.max_response_tokens=16"]

    def terms_of(limit: int) -> dict[str, float]:
        limits = [*overrides, f"data.eval.arithmetic.max_response_tokens={limit}"]
        groups, _ = evaluate(tiny_run, limits, LongEngine(), 1)
        terms: dict[str, float] = groups[0].samples[0].reward_terms
        return terms

    for limit, penalty in ((16, (16 - 8 - 12) / 8), (64, 0.0)):
        found = terms_of(limit)
        assert found["answer"] == 1.0
        assert found["overlong"] == penalty
