"""What TRL's SFTTrainer makes of chats with a model: the loss and the gradient of one batch of all of them."""

from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from tests.parallel.chats import CHATS
from tests.parallel.expected import file_gradients


@dataclass(frozen=True)
class TrlStep:
    """Loss in nats, the tokens that it is a mean over, their mean entropy, and the gradient by name of the files."""

    loss: float
    tokens: int
    entropy: float
    gradient: dict[str, torch.Tensor]


def trl_step(model: Path, kind: str, output: Path) -> TrlStep:
    """Let TRL tokenize, mask and collate the chats by itself, and compute."""
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
