"""Check settings, files and data of supervised fine-tuning and read its inputs, before process groups exist."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from grpo_mp.checkpoint.run_state import check_same_data
from grpo_mp.config import SftSettings, dump_settings
from grpo_mp.data.chat_data import ChatEncoder, ChatReader, ChatSet, load_held_out_chats, load_train_chats, stop_tokens
from grpo_mp.models.hf_config import HfConfig, check_positions
from grpo_mp.models.tokenizer import read_tokenizer
from grpo_mp.monitor.loggers import MakeLogger, load_loggers
from grpo_mp.policy.policy import check_policy
from grpo_mp.trainer.preflight import check_attention, check_export, check_place


@dataclass(frozen=True)
class SftInputs:
    """Inputs of supervised fine-tuning: model config, tokenizer, samples. `warnings`: shown at the start."""

    hf: HfConfig
    tokenizer: PreTrainedTokenizerBase
    train: ChatSet
    evals: dict[str, ChatSet]
    make_loggers: tuple[MakeLogger, ...]
    warnings: tuple[str, ...]


def run_sft_preflight(settings: SftSettings, world_size: int) -> SftInputs:
    """Check settings against model, files and layout, and read the data."""
    make_loggers = load_loggers(settings.monitor.loggers)
    check_place(settings.run, settings.monitor, dump_settings(settings))
    check_attention(settings.model.dtype, settings.layout.context)
    hf = settings.model.read_config()
    tokenizer = read_tokenizer(settings.model.path, hf, settings.model.trust_remote_code)
    check_positions(hf, settings.sft.max_tokens, "sft.max_tokens")
    check_policy(hf, settings.model, layout=settings.layout, training=settings.training, world_size=world_size)
    check_export(settings.run, settings.model)
    stops, variables = stop_tokens(settings.model.path, tokenizer), settings.data.chat_template_kwargs
    encoder = ChatEncoder(tokenizer, settings.sft.loss_on, stops, variables)
    reader = ChatReader(settings.data, settings.sft, encoder)
    train = load_train_chats(reader)
    check_same_data(settings.run.folder, train.digest)
    train.check_size("sft.batch_size", settings.sft.batch_size, "samples", settings.data.train)
    evals = load_held_out_chats(reader)
    warnings = tuple(sentence for chats in (train, *evals.values()) for sentence in chats.warnings)
    return SftInputs(hf, tokenizer, train=train, evals=evals, make_loggers=make_loggers, warnings=warnings)
