"""Sentences that describe the run that the settings would start, for --dry-run."""

from collections.abc import Iterable, Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from grpo_mp.config.data_sections import EvalSetConfig
from grpo_mp.config.sections import EngineConfig, LayoutConfig
from grpo_mp.data.chat_data import ChatSet
from grpo_mp.distributed.layout import describe_parallelism
from grpo_mp.rollout.engine_layout import engine_host_ranks, engine_placements
from grpo_mp.trainer.preflight import RunInputs
from grpo_mp.utils.types import Sample


def describe_ranks(layout: LayoutConfig, world_size: int, engine_ranks: int, ranks_per_node: int) -> str:
    """Return a sentence on the number of ranks and the layout of the training ranks."""
    sizes = describe_parallelism(layout, world_size - engine_ranks)
    return f"ranks: {world_size}, {ranks_per_node} on each node; layout: {sizes}"


def describe_engines(engine: EngineConfig, world_size: int, ranks_per_node: int) -> str:
    """Return a sentence on the engines and the ranks that host them."""
    hosts = engine_host_ranks(engine_placements(engine, world_size, ranks_per_node))
    return f"engines: {len(hosts)} x {engine.gpus_per_engine} rank(s), hosted by ranks {hosts}"


def describe_prompts(inputs: RunInputs, evals: Mapping[str, EvalSetConfig]) -> list[str]:
    """Return sentences on the prompts."""
    train = inputs.train
    filtered = f", {train.filtered} for their pass rate" if train.filtered else ""
    counts = " + ".join(str(share.count) for share in train.mixture)
    mixed = f", of which an epoch has {counts}" if train.mixture else ""
    sets = [f"{len(prompts)} of {name} x {evals[name].samples}" for name, prompts in inputs.evals.items()]
    first = inputs.tokenizer.decode(list(train[0].tokens), clean_up_tokenization_spaces=False)
    return [
        f"train prompts: {len(train)} ({train.too_long} longer than the limit{filtered} left out){mixed}; "
        f"eval: {', '.join(sets) or 'none'}",
        f"first prompt, as the policy reads it: {first!r}",
    ]


def describe_chats(
    train: ChatSet, held_out: Mapping[str, ChatSet], max_tokens: int, tokenizer: PreTrainedTokenizerBase
) -> list[str]:
    """Return sentences on the samples; loss tokens of the first sample are in double brackets."""
    lengths, num_learned = train.sizes.T
    learned = num_learned.sum() / lengths.sum()
    evals = ", ".join(f"{len(chats)} of {name}" for name, chats in held_out.items()) or "none"
    return [
        f"train samples: {len(train)} ({train.too_long} left out, longer than {max_tokens} tokens); "
        f"{lengths.mean():.0f} tokens each, up to {lengths.max()}, {learned:.0%} of them learned; eval: {evals}",
        f"first sample, what is learned in [[ ]]: {show_learned(train[0], tokenizer)}",
    ]


def dry_run_text(facts: Iterable[str], warnings: Iterable[str], folder: Path, settings: str) -> str:
    """Return the text of a dry run. `settings`: as YAML."""
    end = f"run folder: {folder}; nothing was started"
    return "\n".join([*facts, *(f"warning: {text}" for text in warnings), end, "", settings])


def show_learned(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a sample as one line of text, with its loss tokens in double brackets."""
    parts = [tokenizer.decode(list(sample.prompt_tokens))]
    mask = sample.generated or (True,) * len(sample.tokens)
    for is_learned, run in groupby(zip(mask, sample.tokens, strict=True), itemgetter(0)):
        text = tokenizer.decode([token for _, token in run])
        parts.append(f"[[{text}]]" if is_learned else text)
    return repr("".join(parts))
