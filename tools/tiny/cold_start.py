"""Cold start of the quickstart, as in DeepSeek-R1 (section 2.3.1): supervised steps until answers are probable."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from grpo_mp.batching.packing import gather_responses
from grpo_mp.config import SftSettings, check_sft_settings
from grpo_mp.data.chat_data import ChatSet
from grpo_mp.data.cursor import Cursor
from grpo_mp.distributed.process_groups import single_rank_environment, start_parallel, stop_parallel
from grpo_mp.policy.policy import Policy
from grpo_mp.sft import SftInputs, read_inputs
from grpo_mp.trainer.save import export_policy
from grpo_mp.trainer.sft_step import next_batch, pack_samples, supervised_update
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import Message
from tools.tiny.arithmetic import write_rows

LIMIT_S = 600.0  # timeout of the process groups
HELD_OUT = "held_out"
NUM_HELD_OUT = 200  # the last examples are held out
EVAL_EVERY = 10  # steps
FILES = ("cold_start.jsonl", "cold_start_held_out.jsonl")
Example = dict[str, list[Message]]  # a row of chat data


@dataclass(frozen=True)
class ColdStartStep:
    """Progress after a supervised step."""

    step: int
    loss: float  # nats per learned token
    prob: float | None  # mean probability of a whole worked answer to a held-out example; None: not measured


def write_examples(examples: Sequence[Example], folder: Path) -> tuple[Path, Path]:
    """Write the examples as chat data, the last NUM_HELD_OUT to a second file; return the paths of both files."""
    train, held_out = (folder / name for name in FILES)
    write_rows(examples[:-NUM_HELD_OUT], train)
    write_rows(examples[-NUM_HELD_OUT:], held_out)
    return train, held_out


def cold_start_settings(model: Path, train: Path, held_out: Path, seed: int, steps: int) -> SftSettings:
    """Return the settings of the supervised steps. The learning rate falls to a tenth within `steps`."""
    values = {
        "run": {"folder": model.parent / f"{model.name}_sft", "steps": steps, "seed": seed},
        "model": {"path": model, "dtype": "float32"},
        "data": {"train": str(train), "eval": {HELD_OUT: str(held_out)}},
        "sft": {"batch_size": 128, "max_tokens": 256},
        "optimizer": {"lr": 3e-3, "min_lr": 3e-4, "lr_schedule": "linear", "warmup_updates": 5},
        "training": {"max_tokens_per_microbatch": 8192},
    }
    return check_sft_settings(values, "cold start")


def cold_start(
    settings: SftSettings, output: Path, target: float, on_step: Callable[[ColdStartStep], None]
) -> ColdStartStep:
    """Fine-tune a random model in this process until the held-out answers have the mean probability `target`.

    Writes the model to the folder `output` and returns the last step. Raises UserError if `run.steps` steps do not
    reach `target`.
    """
    inputs = read_inputs(settings, world_size=1)
    settings = settings.with_steps(inputs.train.epoch_size)
    with single_rank_environment():
        parallel = start_parallel(settings.layout, settings.run.seed, LIMIT_S)
        policy = Policy(settings, parallel, with_reference=False)
        for step in _steps(policy, settings, inputs, target):
            on_step(step)
        export_policy(policy, output, settings.model.path, settings.bucket_bytes)
        stop_parallel()
    if (step.prob or 0.0) < target:
        raise UserError(
            f"the cold start reached {step.prob or 0.0:.0%} of {target:.0%} in {settings.run.steps} steps: allow more"
        )
    return step


def _steps(policy: Policy, settings: SftSettings, inputs: SftInputs, target: float) -> Iterator[ColdStartStep]:
    """Train until the held-out answers have the mean probability `target` or all steps are done; yield each step.

    The probability of the worked answer is a lower bound of the accuracy of sampled answers.
    """
    cursor = Cursor(seed=settings.run.seed)
    samples_seen = 0
    for step in range(1, settings.run.steps + 1):
        count = settings.step_samples(inputs.train.epoch_size, samples_seen)
        max_tokens = settings.training.max_tokens_per_microbatch
        batch = next_batch(inputs.train, cursor, count, settings.data.shuffle, max_tokens, policy)
        cursor = batch.cursor
        samples_seen = samples_seen + len(batch.indices)
        _, measured = supervised_update(policy, batch.packed)
        prob = answer_probability(policy, inputs.evals[HELD_OUT], settings) if step % EVAL_EVERY == 0 else None
        yield ColdStartStep(step, measured["sft/loss"], prob)
        if prob is not None and prob >= target:
            return


def answer_probability(policy: Policy, data: ChatSet, settings: SftSettings) -> float:
    """Return the product of the probabilities of a sample's learned tokens, averaged over the samples; for one rank."""
    batch = pack_samples(data, range(len(data)), settings.training.max_tokens_per_microbatch, policy)
    outputs = policy.logprobs(batch.microbatches)
    answers = [
        answer.double().sum()
        for microbatch, output in zip(batch.microbatches, outputs, strict=True)
        for answer in gather_responses(output[0].cpu(), microbatch)
    ]
    return float(torch.stack(answers).exp().mean())
