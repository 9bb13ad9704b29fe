"""Supervised steps on worked examples: what a policy needs before rewards can improve it (R1, section 2.3.1)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from grpo_mp.batching.packing import gather_responses
from grpo_mp.batching.updates import microbatches, plan_updates
from grpo_mp.config import Settings, check_settings
from grpo_mp.data.cursor import Cursor, take
from grpo_mp.distributed.process_groups import single_rank_environment, start_parallel, stop_parallel
from grpo_mp.errors import UserError
from grpo_mp.policy.policy import Policy
from grpo_mp.trainer.save import export_policy
from grpo_mp.types import MicroBatch, Sample

LIMIT_S = 600.0  # of a wait in a job of one rank
MICROBATCH_TOKENS = 8192


@dataclass(frozen=True)
class SftConfig:
    """How the supervised steps run."""

    steps: int = 300  # at most; the rate falls to a tenth by then
    batch: int = 128
    lr: float = 3e-3
    held_out: int = 200


@dataclass(frozen=True)
class ColdStartStep:
    """Progress of the supervised steps."""

    step: int
    loss: float  # nats per response token
    prob: float | None  # probability of the full worked response, mean over the held-out examples; None: not measured


def cold_start(
    random_model: Path,
    output: Path,
    examples: Sequence[Sample],
    seed: int,
    target: float,
    config: SftConfig,
    on_step: Callable[[ColdStartStep], None],
) -> ColdStartStep:
    """Train the model of `random_model` on worked examples, in this process, and write it to the folder `output`.

    `examples`: prompts and worked responses; the last `recipe.held_out` are for evaluation only.
    Returns the last step that was evaluated. Raises UserError where `target` is not reached in time.
    """
    settings = _settings(random_model, seed, config)
    train, held_out = examples[: -config.held_out], examples[-config.held_out :]
    with single_rank_environment():
        parallel = start_parallel(settings.layout, seed, LIMIT_S)
        policy = Policy(settings, parallel, with_reference=False)
        for step in run_sft(policy, train, held_out, config, seed, target):
            on_step(step)
        export_policy(policy, output, random_model, settings.sync.bucket_bytes)
        stop_parallel()
    if (step.prob or 0.0) < target:
        raise UserError(f"the cold start reached {step.prob:.0%} of {target:.0%} in {config.steps} steps: allow more")
    return step


def make_example(number: int, prompt: str, response: str, tokenizer: PreTrainedTokenizerBase) -> Sample:
    """Tokenize a worked example with the chat template."""
    chat = [{"role": "user", "content": prompt}]
    prompt_tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    response_tokens = [*tokenizer.encode(response, add_special_tokens=False), tokenizer.eos_token_id]
    return Sample.from_tokens(number, prompt_tokens, response_tokens)


def run_sft(
    policy: Policy,
    examples: Sequence[Sample],
    held_out: Sequence[Sample],
    config: SftConfig,
    seed: int,
    target: float,
    eval_every: int = 10,
) -> Iterator[ColdStartStep]:
    """Update until the held-out examples are answered with probability `target`, or `recipe.steps` are done.

    The probability of the worked response itself is a lower bound of the accuracy of sampled answers.
    """
    cursor = Cursor(seed=seed)
    for step in range(1, config.steps + 1):
        indices, cursor = take(cursor, len(examples), config.batch, shuffle=True)
        update = _microbatches(policy, [examples[i] for i in indices])
        report = policy.update(update, negative_log_likelihood)
        loss = sum(float(value) for value in report.losses)
        prob = _response_probability(policy, held_out) if step % eval_every == 0 else None
        yield ColdStartStep(step, loss, prob)
        if prob is not None and prob >= target:
            return


def negative_log_likelihood(logprobs: Tensor, entropy: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return the token mean of -log p over the responses; the weights hold the denominator."""
    loss = -(logprobs * batch.to(logprobs.device).loss_weights).sum()
    return loss, loss.detach()


def _settings(model: Path, seed: int, config: SftConfig) -> Settings:
    values = {
        "run": {"folder": model.parent, "steps": config.steps, "seed": seed},
        "model": {"path": model, "dtype": "float32"},
        "data": {"train": "worked examples"},
        "rollout": {"prompts_per_step": 1, "group_size": 2, "max_prompt_tokens": 64, "max_response_tokens": 64},
        "reward": {"answer": 1.0},
        "optimizer": {"lr": config.lr, "min_lr": config.lr / 10, "lr_schedule": "linear", "warmup_updates": 5},
    }
    return check_settings(values, "cold start")


def _response_probability(policy: Policy, held_out: Sequence[Sample]) -> float:
    batches = _microbatches(policy, held_out)
    with policy.use_temperature(1.0):
        outputs = policy.logprobs(batches)
    responses = [
        response.double().sum()
        for batch, output in zip(batches, outputs, strict=True)
        for response in gather_responses(output[0].cpu(), batch)
    ]
    return float(torch.stack(responses).exp().mean())


def _microbatches(policy: Policy, samples: Sequence[Sample]) -> list[MicroBatch]:
    lengths, layout = [sample.total_tokens for sample in samples], policy.parallel.layout
    (update,) = plan_updates(lengths, 1, layout, 1, MICROBATCH_TOKENS, policy.config.hidden_size)
    weights = [1.0 / sum(len(sample.tokens) - sample.given_tokens for sample in samples)] * len(samples)
    return microbatches(update, dict(enumerate(samples)), [1.0] * len(samples), weights, layout, 0, 0)
