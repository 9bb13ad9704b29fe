"""Check and read everything that supervised fine-tuning needs before a process group exists: settings, files, data."""

import math
import os
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from grpo_mp.checkpoint.run_state import check_run_folder, check_same_data
from grpo_mp.checkpoint.settings_changes import use_template_date
from grpo_mp.config import SftSettings, dump_settings
from grpo_mp.data.chat_data import ChatSet, load_held_out_chats, load_train_chats, stop_tokens
from grpo_mp.data.set_checks import smallest_set, too_few
from grpo_mp.data.supervised import ChatEncoder
from grpo_mp.distributed.layout import describe_parallelism
from grpo_mp.models.hf_config import HfConfig, check_positions
from grpo_mp.models.tokenizer import read_tokenizer
from grpo_mp.monitor.loggers import MakeLogger, load_loggers
from grpo_mp.policy.parameter_bytes import policy_disk_need
from grpo_mp.policy.policy import check_policy
from grpo_mp.trainer.describe import describe_settings
from grpo_mp.trainer.disk_check import check_disk
from grpo_mp.trainer.preflight import check_device_for, check_export, check_guards
from grpo_mp.utils.errors import UserError


@dataclass(frozen=True)
class SftInputs:
    """What a run reads: model config, tokenizer, samples. `warnings`: sentences that the start of the run shows."""

    hf: HfConfig
    tokenizer: PreTrainedTokenizerBase
    train: ChatSet
    evals: dict[str, ChatSet]
    make_loggers: tuple[MakeLogger, ...]
    warnings: tuple[str, ...]


def run_sft_preflight(settings: SftSettings, world_size: int) -> tuple[SftSettings, SftInputs]:
    """Check settings against model, files and layout, and read the data. Raises UserError.

    Also returns the settings with the steps that the run has on its data.
    """
    make_loggers = load_loggers(settings.monitor.loggers)
    check_guards(settings.monitor.guards)
    hf = settings.model.read_config()
    check_run_folder(settings.run.folder, dump_settings(settings), settings.run.resume == "auto")
    use_template_date(settings.run.folder)
    check_device_for("auto", settings.model.dtype, settings.layout.context)
    tokenizer = read_tokenizer(settings.model.path, hf, settings.model.trust_remote_code)
    check_positions(hf, settings.sft.max_tokens, "sft.max_tokens")
    check_policy(hf, settings.model, layout=settings.layout, training=settings.training, world_size=world_size)
    check_export(settings.run, settings.model)
    stops, variables = stop_tokens(settings.model.path, tokenizer), settings.data.chat_template_kwargs
    encoder = ChatEncoder(tokenizer, settings.sft.loss_on, stops, variables)
    train = load_train_chats(settings.data, settings.sft, encoder)
    check_same_data(settings.run.folder, train.digest)
    if train.epoch_size < settings.sft.batch_size:
        smallest = smallest_set("data.train", settings.data.train, train.mixture)
        takes = f"sft.batch_size={settings.sft.batch_size}"
        raise UserError(too_few(train.source, train.epoch_size, unit="samples", takes=takes, smallest=smallest))
    evals = load_held_out_chats(settings.data, settings.sft, encoder)
    settings = settings.with_steps(train.epoch_size)
    need, probes = policy_disk_need(settings, hf), os.environ.get("RANK", "0") == "0"
    of_data = (sentence for chats in (train, *evals.values()) for sentence in chats.warnings)
    warnings = (*of_data, *check_disk(settings.run.folder, need, probes=probes))
    return settings, SftInputs(hf, tokenizer, train=train, evals=evals, make_loggers=make_loggers, warnings=warnings)


def describe_sft(
    settings: SftSettings, inputs: SftInputs, world_size: int, ranks_per_node: int, every_setting: bool = False
) -> str:
    """Return the facts of a run, its first sample as text, and its settings as YAML, for a dry run."""
    sft, train = settings.sft, inputs.train
    lengths, learned = train.lengths, train.learned.sum() / train.lengths.sum()
    evals = ", ".join(f"{len(held_out)} of {name}" for name, held_out in inputs.evals.items()) or "none"
    steps = settings.run.steps
    epochs = min(sft.epochs or math.inf, steps * sft.batch_size / train.epoch_size)  # the last step of all is partial
    facts = [
        f"ranks: {world_size}, {ranks_per_node} on each node; "
        f"layout: {describe_parallelism(settings.layout, world_size)}",
        f"train samples: {len(train)} ({train.too_long} left out, longer than {sft.max_tokens} tokens); "
        f"{lengths.mean():.0f} tokens each, up to {lengths.max()}, {learned:.0%} of them learned; "
        f"eval: {evals}",
        f"{steps} steps of {sft.batch_size} samples: "
        f"{epochs:.2f} epochs; micro-batches of up to "
        f"{settings.training.max_tokens_per_microbatch} tokens",
        f"first sample, what is learned in [[ ]]: {show_learned(inputs)}",
        *(f"warning: {text}" for text in inputs.warnings),
        f"run folder: {settings.run.folder}; nothing was started",
    ]
    return "\n".join([*facts, "", describe_settings(settings, every_setting)])


def show_learned(inputs: SftInputs) -> str:
    """Return the first sample as text, with what is learned in double brackets, on one line."""
    sample, decode = inputs.train[0], inputs.tokenizer.decode
    parts, run = [decode(list(sample.prompt_tokens))], list[int]()
    mask = sample.generated or (True,) * len(sample.tokens)
    for index, (token, is_learned) in enumerate(zip(sample.tokens, mask, strict=True)):
        run.append(token)
        if index + 1 == len(mask) or mask[index + 1] != is_learned:
            parts.append(f"[[{decode(run)}]]" if is_learned else decode(run))
            run = []
    return repr("".join(parts))
