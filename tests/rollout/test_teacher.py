"""The teacher's client against a real SGLang server; its logprobs against transformers."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from grpo_mp.rewards.teacher import TeacherClient
from grpo_mp.rollout.server import EngineProcess
from grpo_mp.utils.section import ServedModelConfig
from grpo_mp.utils.types import Prompt, Sample, SampleGroup

KEY = "TEACHER_KEY"
PROMPT = Prompt(0, "?", (5, 6, 7))


def sample(index: int, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> Sample:
    zeros = (0,) * len(tokens)
    return Sample(0, index, prompt, tokens, tuple(map(float, zeros)), zeros, truncated=False)


def test_logprobs_are_those_of_transformers(
    engine: EngineProcess,
    model_folder: Path,
    expected_logprobs: Callable[..., torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also the second time, when the engine knows the prefixes, for a prompt of one token, and for the last token.

    So are the most likely tokens in each place, the vocabulary's last among them.
    """
    monkeypatch.setenv(KEY, engine.api_key)
    last = json.loads((model_folder / "config.json").read_text())["vocab_size"] - 1
    samples = (
        sample(0, PROMPT.tokens, (9, 10, 11, 12)),
        sample(1, PROMPT.tokens, (9, last, 30, last)),
        sample(2, (8,), tuple(range(20, 60))),
    )
    topk = last // 2
    teacher = TeacherClient(ServedModelConfig(path=engine.url, api_key_env=KEY), topk, last + 1)
    seen = set[int]()
    for _ in range(2):
        scored = teacher.score_group(SampleGroup(PROMPT, samples))
        for one in scored.samples:
            table = expected_logprobs(model_folder, [*one.prompt_tokens, *one.tokens])[len(one.prompt_tokens) - 1 : -1]
            reference = table.gather(1, torch.tensor(one.tokens)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(one.teacher_logprobs), reference, atol=1e-4, rtol=0)
            assert reference.std() > 0.1
            assert one.teacher_topk
            ids, logprobs = (torch.tensor(values) for values in vars(one.teacher_topk).values())
            torch.testing.assert_close(logprobs, table.gather(1, ids.long()), atol=1e-4, rtol=0)
            torch.testing.assert_close(logprobs, table.topk(topk, 1).values, atol=1e-4, rtol=0)
            seen |= set(ids.flatten().tolist())
    assert seen >= {0, last}
    teacher.close()
