"""Loads a model folder's tokenizer."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from grpo_mp.models.hf_config import HfConfig
from grpo_mp.utils.errors import UserError, one_line
from grpo_mp.utils.reading import check_regular, read_json


def read_tokenizer(folder: Path, hf: HfConfig, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a policy's folder; raise an error if it has more tokens than `vocab_size`."""
    tokenizer = load_tokenizer(folder, trust_remote_code)
    vocabulary = hf.int("vocab_size")
    used = (number for token, number in tokenizer.get_vocab().items() if "reserved" not in token)
    tokens = max(used, default=-1) + 1
    if tokens > vocabulary:
        raise UserError(
            f"{folder}: the tokenizer has {tokens} tokens, config.json says vocab_size {vocabulary}: "
            "use the tokenizer of this model"
        )
    return tokenizer


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load a folder's tokenizer. Its Python code runs only if it is trusted and the folder has no tokenizer.json."""
    file = folder / "tokenizer.json"
    own_class = _own_class(folder)
    tokenizer: PreTrainedTokenizerBase
    if file.is_file():
        check_regular(file)
    elif own_class and not trust_remote_code:
        raise UserError(
            f"{folder}: the tokenizer is Python code of the folder ({own_class}), which does not run: read it and "
            "set model.trust_remote_code=true, or save the tokenizer as tokenizer.json"
        )
    options: dict[str, Any] = {"clean_up_tokenization_spaces": False}
    try:
        if file.is_file():  # the class of a model may replace the file's pre-tokenizer by its own
            tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), trust_remote_code=False, **options)
        else:
            from transformers import AutoTokenizer  # slow to import

            tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=bool(own_class), **options)
    except (Exception, SystemExit) as error:  # libraries and trusted code raise exceptions of any type
        raise UserError(f"{folder}: the tokenizer cannot be read ({one_line(error, 200)})") from error
    tokenizer.init_kwargs.pop("auto_map", None)  # a saved copy would refer to code that it lacks
    return tokenizer


def _own_class(folder: Path) -> str:
    """Return the name of the tokenizer's class in the folder's code; "" if there is none."""
    file = folder / "tokenizer_config.json"
    named = (read_json(file) if file.exists() else {}).get("auto_map") or ()
    named = named.get("AutoTokenizer") if isinstance(named, dict) else named
    names = [named] if isinstance(named, str) else named or ()
    return next((str(name) for name in reversed(names) if name), "")
