"""Loss and gradient of supervised fine-tuning: every layout against TRL's SFTTrainer on the same chats."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from tests.parallel.cases import Case, cases_with
from tests.parallel.chats import CHATS
from tests.parallel.conftest import Outcomes
from tests.parallel.expected import file_gradients
from tests.parallel.full_model import exceeding, relative_errors

BOUND = 1e-5


@dataclass(frozen=True)
class TrlStep:
    """Loss in nats, the tokens that it is a mean over, their mean entropy, and the gradient by name of the files."""

    loss: float
    tokens: int
    entropy: float
    gradient: dict[str, torch.Tensor]


@cache
def trl_step(model: Path, kind: str, output: Path) -> TrlStep:
    """Run TRL's SFT trainer on the chats; return its loss and gradients."""
    rows, template = CHATS[kind]
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    arguments = SFTConfig(
        output_dir=str(output),
        per_device_train_batch_size=len(rows),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_length=None,
        shuffle_dataset=False,
        report_to=[],
        router_aux_loss_coef=0.0 if hasattr(policy.config, "router_aux_loss_coef") else None,
        **{kind: True},
    )
    trainer = SFTTrainer(policy, arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    batch = trainer.data_collator(list(trainer.train_dataset))
    tokens = int((batch["labels"][:, 1:] != -100).sum())
    loss = trainer.compute_loss(trainer.model.train(), batch, num_items_in_batch=torch.tensor(tokens))
    loss.backward()
    (entropy,) = trainer._metrics["train"]["entropy"]
    return TrlStep(float(loss), tokens, entropy, file_gradients(trainer.model))


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trl")


@pytest.fixture(params=CHATS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("case", cases_with("supervised"), ids=lambda case: case.name)
def test_loss_and_gradient_are_those_of_trl(case: Case, kind: str, outcomes: Outcomes, output: Path) -> None:
    expected: TrlStep = trl_step(outcomes.models[case.model].folder, kind, output)
    for rank in outcomes.by_rank(case, "supervised"):
        sums = rank[kind]["sums"]
        assert sums["tokens"] == expected.tokens
        assert sums["loss"] == pytest.approx(expected.loss, rel=BOUND)
        assert sums["entropy"] / sums["tokens"] == pytest.approx(expected.entropy, rel=BOUND)
    gradient = outcomes.family_gradient(case, kind, "supervised")
    assert not exceeding(relative_errors(gradient, expected.gradient), BOUND)
