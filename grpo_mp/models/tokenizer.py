"""Loads a model folder's tokenizer, and verifies it against the folder's tokenizer.json."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from grpo_mp.models.hf_config import HfConfig
from grpo_mp.utils.errors import UserError, one_line
from grpo_mp.utils.reading import check_regular, read_json, shorten

LOGGER = logging.getLogger(__name__)
# Texts on which pre-tokenizers differ: runs of spaces, line breaks, capitals inside words, contractions, digits, code,
# scripts without spaces, combining characters.
PROBES = (
    "How many apples does she have? 12.",
    "  two  three   four    blanks\n\n\nlines\r\n\ttabs\t\tand a blank at the end ",
    "DataBase camelCase HTTPServer iPhone McDonald's it's IT'S we'll don't",
    "1 12 123 1234567 3.14159 1,000,000 2^10 x1y2",
    "def f(x_1):\n    return {'a': x**2 != 1}  # ok?!\n\n\tpass;;\n\\boxed{\\frac{1}{2}} $x$",
    "数学：小明有3个苹果，又买了五个。中文English混合 日本語かな 한국어",
    "naïve café Ünïcode Straße Ж Привет ไทย हिन्दी عربى e\u0301 ﬁ ½ ² № …",
    "🙂 👩‍👩‍👧 🇩🇪 ok🙂🙂?! <a href='#'>&amp;</a> http://a.b/c?d=e&f=1",
)


@dataclass(frozen=True)
class Reference:
    """Expected encoding and decoding, from the folder's tokenizer.json. `texts`: the texts to compare."""

    file: Path
    texts: tuple[str, ...]
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]


def read_tokenizer(folder: Path, hf: HfConfig, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a policy's folder; raise an error if it has more tokens than `vocab_size`."""
    tokenizer, vocabulary = load_tokenizer(folder, trust_remote_code), hf.int("vocab_size")
    used = (number for token, number in tokenizer.get_vocab().items() if "reserved" not in token)
    tokens = max(used, default=-1) + 1
    if tokens > vocabulary:
        raise UserError(
            f"{folder}: the tokenizer has {tokens} tokens, config.json says vocab_size {vocabulary}: "
            "use the tokenizer of this model"
        )
    return tokenizer


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load a folder's tokenizer so that it encodes and decodes as the folder's tokenizer.json does.

    transformers may use the pre-tokenizer of a model class instead of the file's; the plain fast tokenizer is then
    loaded. Python code of the folder runs only with `trust_remote_code`, and only if the folder has no tokenizer.json.
    """
    try:
        if (file := folder / "tokenizer.json").is_file():
            return _first_equal(folder, _reference(check_regular(file)))
        own_class = _own_class(folder)
        if own_class and not trust_remote_code:
            raise UserError(
                f"{folder}: the tokenizer is Python code of the folder ({own_class}), which does not run: read it and "
                "set model.trust_remote_code=true, or save the tokenizer as tokenizer.json"
            )
        if own_class:
            return _checked(AutoTokenizer.from_pretrained(str(folder), trust_remote_code=True), None)
        return _checked(_load(AutoTokenizer, folder), None)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # libraries and trusted code raise exceptions of any type
        raise UserError(f"{folder}: the tokenizer cannot be read ({one_line(error, 200)})") from error


def text_difference(tokenizer: Any, reference: Reference | None) -> str:
    """Describe the first text that a tokenizer encodes or decodes differently from `reference`; "" if none."""
    if reference is None:
        text = PROBES[0]
        back = str(tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"])).strip()
        return "" if back == text else f"it returns {text!r} as {shorten(repr(back))}"
    for text in reference.texts:
        expected, ids = reference.encode(text), tokenizer(text, add_special_tokens=False)["input_ids"]
        if ids != expected:
            return f"{text!r} becomes {shorten(str(ids))}, not {shorten(str(expected))}"
        if (written := tokenizer.decode(ids)) != (wanted := reference.decode(ids)):
            return f"{text!r} is written as {shorten(repr(written))}, not {shorten(repr(wanted))}"
    return ""


def _first_equal(folder: Path, reference: Reference) -> PreTrainedTokenizerBase:
    try:
        return _checked(_load(AutoTokenizer, folder), reference)
    except Exception as error:  # noqa: BLE001 - libraries raise any type; the plain class may still work
        LOGGER.info("%s: transformers' class is not used: %s", folder, one_line(error, 200))
    return _checked(_load(PreTrainedTokenizerFast, folder), reference)


def _load(cls: Any, folder: Path) -> Any:
    tokenizer = cls.from_pretrained(str(folder), trust_remote_code=False, clean_up_tokenization_spaces=False)
    tokenizer.init_kwargs.pop("auto_map", None)  # a saved copy would refer to code that it lacks
    return tokenizer


def _checked(tokenizer: Any, reference: Reference | None) -> PreTrainedTokenizerBase:
    if difference := text_difference(tokenizer, reference):
        loaded = f"transformers {transformers.__version__} loads {type(tokenizer).__name__}"
        source = f", which differs from {reference.file.name}" if reference else ""
        raise UserError(
            f"{tokenizer.name_or_path}: {loaded}{source}: {difference}: save the tokenizer as tokenizer.json, and "
            "change nothing of it in tokenizer_config.json"
        )
    kept: PreTrainedTokenizerBase = tokenizer
    return kept


def _reference(file: Path) -> Reference:
    own = Tokenizer.from_file(str(file))
    own.no_truncation()
    own.no_padding()
    return Reference(
        file,
        (*PROBES, _between(token.content for token in own.get_added_tokens_decoder().values())),
        lambda text: list(own.encode(text, add_special_tokens=False).ids),
        lambda ids: str(own.decode(ids, skip_special_tokens=False)),
    )


def _between(tokens: Iterable[str]) -> str:
    return "".join(f"Here{token}there" for token in islice(tokens, 8))


def _own_class(folder: Path) -> str:
    file = folder / "tokenizer_config.json"
    named = (read_json(file) if file.exists() else {}).get("auto_map") or ()
    named = named.get("AutoTokenizer") or () if isinstance(named, dict) else named
    named = [named] if isinstance(named, str) else named
    return next((str(name) for name in reversed(named) if name), "")
