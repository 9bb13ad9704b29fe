"""Every example of EXTENDING.md runs: written to a folder, named in settings, and called by what it plugs into."""

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

import grpo_mp
from grpo_mp.algorithms.advantages import estimate_advantages
from grpo_mp.algorithms.settings import AlgorithmConfig
from grpo_mp.batching.group_selection import PromptCurriculum
from grpo_mp.batching.packing import gather_responses
from grpo_mp.config import Settings, check_settings
from grpo_mp.data.prompts import PromptReader, load_train_prompts
from grpo_mp.data.self_teacher import SelfTeacher
from grpo_mp.data.template import ChatRenderer
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.monitor.loggers import open_loggers, write_metrics
from grpo_mp.monitor.run_folder import read_metrics
from grpo_mp.planner.clusters import read_cluster
from grpo_mp.planner.job import make_job
from grpo_mp.policy.forward import sequence_logits
from grpo_mp.policy.policy import Policy, check_policy
from grpo_mp.rewards.scorer import Scorer
from grpo_mp.trainer.preflight import Extensions, load_extensions
from grpo_mp.trainer.sampling.filters import apply_filters, load_sample_filters
from grpo_mp.utils.types import Prompt, Sample, SampleGroup, SampleInfo
from tests.algorithms.objective import draw_update, loss_of, objective, to_microbatches
from tests.minimal_settings import MINIMAL_SETTINGS
from tests.one_rank import one_rank_job
from tools.tiny.models import make_tiny, make_tokenizer

PAGE = (Path(grpo_mp.__file__).parent / "EXTENDING.md").read_text()
EXAMPLES = {
    heading: (code, yaml.safe_load(settings))
    for heading, code, settings in re.findall(
        r"^## ([\w ]+)\n.*?^```python\n(.*?)^```\n\n```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL
    )
}
Use = Callable[[str], tuple[Settings, Extensions]]


@pytest.fixture
def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Use:
    """Write the example under a heading into the working directory, and load it as its YAML line says."""

    def load(heading: str, **sections: Any) -> tuple[Settings, Extensions]:
        code, tree = EXAMPLES[heading]
        (tmp_path / re.findall(r"^# (\w+\.py)$", code, re.MULTILINE)[0]).write_text(code)
        monkeypatch.chdir(tmp_path)
        sections |= {name: sections.get(name, {}) | values for name, values in tree.items()}
        settings = check_settings(MINIMAL_SETTINGS | sections, "test.yaml")
        return settings, load_extensions(settings.algorithm, settings.monitor.loggers)

    return load


def make_samples(*rewards: tuple[float, ...]) -> list[SampleInfo]:
    return [
        SampleInfo(group, index, 3, 5, reward, False, 0)
        for group, group_rewards in enumerate(rewards)
        for index, reward in enumerate(group_rewards)
    ]


def test_every_kind_has_an_example() -> None:
    headings = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    assert list(EXAMPLES) == headings
    assert len(headings) == PAGE.count("```python") == PAGE.count("```yaml") == 12


def test_the_recipe_names_what_is_in_its_files() -> None:
    recipe = PAGE.partition("### Recipe of a built-in family")[2]
    assert len(recipe.split()) <= 500
    package = Path(grpo_mp.__file__).parent
    missing = []
    for number, step in enumerate(re.split(r"^\d+\. ", recipe, flags=re.MULTILINE)[1:], 1):
        paths = re.findall(r"`([\w/]+\.(?:py|yaml|md))`", step)
        files = [next(file for file in (package / path, package.parent / path) if file.exists()) for path in paths]
        text = "".join(file.read_text() for file in files)
        missing += [(number, name) for name in re.findall(r"`(\w+)[`(]", step) if not re.search(rf"\b{name}\b", text)]
        assert number == 3 or any("tests" in path for path in paths)  # the third names the tests of the second
    assert missing == [(1, "TransformerConfig")]  # Megatron's


def scores(settings: Settings, *texts: str, **columns: Any) -> list[float | None]:
    samples = tuple(Sample(0, i, (1,), (2,), (-1.0,), (0,), False, text) for i, text in enumerate(texts))
    group = SampleGroup(Prompt(0, "x", (1,), columns=columns), samples)
    scored = Scorer(settings.reward, max_response_tokens=32).score_group(group)
    return [sample.reward for sample in scored.samples]


def test_rewards(use: Use) -> None:
    long = "a much longer answer than that"
    assert scores(use("Reward")[0], "so short", long) == pytest.approx([0.2 / 3, 0.2 / 7])
    assert scores(use("Asynchronous reward")[0], "x = 1", "x = = 1", "print('a')") == [0.5, 0.0, 0.5]


def test_prompt_of_a_teacher(use: Use) -> None:
    distillation = use("Prompt of a teacher")[0].algorithm.distillation
    tokenizer = make_tokenizer(["hint"])
    renderer = ChatRenderer(tokenizer)
    teacher = SelfTeacher.load(distillation, renderer, 1000)
    assert teacher
    asked = ({"role": "user", "content": "3+4?"},)
    prompt = Prompt(0, "3+4?", renderer.prompt(asked), "7", messages=asked)
    samples = [replace(Sample.from_tokens(0, prompt.tokens, (1,)), is_correct=right) for right in (True, False)]
    right, wrong = teacher.show(SampleGroup(prompt, tuple(samples))).samples
    assert right.teacher_prompt == ()
    assert wrong.teacher_prompt == renderer.prompt([{"role": "user", "content": "3+4?\n\nHint: the answer is 7."}])


def check_loss(algorithm: AlgorithmConfig, extensions: Extensions, given: list[float], expected: list[float]) -> None:
    """Loss and gradient with the advantages `given` are those of the plain clip with the `expected` ones."""
    update = draw_update((4, 7, 3, 5), (0, 0, 1, 1), seed=3, kl=False)
    (batch,), (logprobs,) = to_microbatches(update, algorithm, 10_000, given)
    leaf = logprobs.clone().requires_grad_()
    loss, _ = loss_of(algorithm, policy_loss=extensions.policy_loss)(leaf, torch.ones_like(leaf), batch)
    (gradient,) = torch.autograd.grad(loss, leaf)
    by_hand = objective(update, AlgorithmConfig(), expected)
    assert loss.item() == pytest.approx(by_hand.loss, rel=1e-6)
    responses = dict(zip(batch.sample_ids, gather_responses(gradient, batch), strict=True))
    for i, values in enumerate(by_hand.gradients):
        assert_close(responses[i].double(), values, rtol=1e-5, atol=1e-7)


def test_policy_loss(use: Use) -> None:
    settings, extensions = use("Policy loss")
    check_loss(settings.algorithm, extensions, [1.0, -1.0, -0.4, 2.0], [1.0, -0.5, -0.2, 2.0])


def test_advantage(use: Use) -> None:
    settings, extensions = use("Advantage")
    rewards = ((0.0, 1.0, 5.0), (2.0, 2.0, -1.0))
    advantage = settings.algorithm.advantage
    actual = estimate_advantages(extensions.estimator, make_samples(*rewards), advantage, {})
    expected = [2.0 * (reward - float(np.median(group))) for group in rewards for reward in group]
    assert actual == expected
    check_loss(settings.algorithm, extensions, actual[:4], expected[:4])


def test_group_filter(use: Use) -> None:
    _, extensions = use("Group filter")
    samples = make_samples((0.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.5, 1.0))
    by_group = [[sample for sample in samples if sample.group_id == group] for group in range(4)]
    assert [extensions.group_filter(group) for group in by_group] == [False, True, False, True]


def test_sample_filter(use: Use) -> None:
    settings, _ = use("Sample filter")
    filters = load_sample_filters(settings.sample.filters, group_size=4, knows_correct=True)
    lengths_and_verdicts = ((2, True), (9, False), (6, True), (4, True))
    samples = tuple(
        Sample(0, index, (1,), (2,) * length, (-1.0,) * length, (0,) * length, False, is_correct=right)
        for index, (length, right) in enumerate(lengths_and_verdicts)
    )
    dropped = Counter[str]()
    kept = apply_filters(SampleGroup(Prompt(0, "x", (1,)), samples), filters, dropped)
    assert [sample.index for sample in kept] == [0, 3]  # of right answers 4 tokens are the mean
    assert list(dropped.values()) == [1, 1]


def test_curriculum(use: Use) -> None:
    settings, extensions = use("Curriculum")
    samples = make_samples((0.0, 0.0), (0.0, 1.0), (1.0, 1.0))
    samples = [replace(sample, prompt=7 + sample.group_id, is_correct=sample.reward > 0) for sample in samples]
    rule = settings.algorithm.curriculum
    after = PromptCurriculum({}, {8: 3}).updated(samples, 4, rule, extensions.curriculum)
    assert after.skipped_until == {7: 9, 9: 54}


def test_data_source(use: Use) -> None:
    settings, _ = use("Data source")
    tokenizer = make_tokenizer(["How", "much", "is"])
    prompts = load_train_prompts(PromptReader(settings.data, tokenizer, 64))
    assert [(prompt.text, prompt.answer) for prompt in prompts] == [
        (f"How much is {n} + {n}?", str(n + n)) for n in range(100)
    ]
    assert settings.data.eval["held_out"].path == "20"


def test_logger(use: Use, tmp_path: Path) -> None:
    settings, extensions = use("Logger")
    loggers = open_loggers(extensions.make_loggers, tmp_path, 0, settings.model_dump(mode="json"))
    scalars = {"reward/mean": 0.5, "train/loss": -0.25, "train/lr": 1e-6}
    write_metrics(loggers, 1, scalars, {"reward/values": [0.0, 1.0]}, {"rollout/samples": "text"})
    write_metrics(loggers, 2, {"reward/mean": 0.75}, {}, {})
    for logger in loggers:
        logger.close()
    assert (tmp_path / "metrics.csv").read_text().splitlines() == ["1,0.5,-0.25", "2,0.75,"]
    assert [line["reward/mean"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [0.5, 0.75]
    assert any((tmp_path / "tensorboard").iterdir())


def test_model_family(use: Use, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shape = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_hidden_layers": 2, "rope_scaling": None}
    values = make_tiny(folder, "llama", make_tokenizer(["apples"]), **shape)
    tokens = torch.randint(values["vocab_size"], (2, 24))
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(tokens).logits
    renamed = values | {"model_type": "my_type", "architectures": ["MyForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(renamed))
    settings, _ = use("Model family", model={"path": str(folder), "dtype": "float32"})
    check_policy(HfConfig.read(folder, settings.model.family), settings.model, settings.layout, settings.training, 1)
    assert make_job(settings, HfConfig.read(folder), read_cluster("h100-80"), 1, 1).model.num_layers == 2
    with one_rank_job() as parallel:
        policy = Policy(settings, parallel, with_reference=False)
        with torch.no_grad():
            logits = [sequence_logits(policy.models()[0], row)[:, : values["vocab_size"]] for row in tokens]
    assert_close(torch.stack(logits), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
