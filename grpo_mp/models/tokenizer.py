"""Read a model folder's tokenizer, and compare it with what the folder's own file gives."""

import ast
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from grpo_mp.models.hf_config import HfConfig
from grpo_mp.utils.errors import UserError, one_line
from grpo_mp.utils.reading import check_regular, read_json, read_text, shorten

LOGGER = logging.getLogger(__name__)
TIKTOKEN = "tiktoken.model"
# Texts that tell splitters apart: runs of blanks, line breaks, capitals inside words, contractions, digits, code,
# scripts without blanks, combined characters.
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
    """What a folder's own file makes of a text."""

    file: Path
    texts: tuple[str, ...]  # to be compared
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]


def read_tokenizer(folder: Path, hf: HfConfig, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Read the tokenizer of a policy's folder."""
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
    """Load a folder's tokenizer so that it gives the ids and texts of the folder's own file.

    transformers may replace a file's splitter by that of a class; the file's own is then loaded in place of the class.
    Python code of the folder runs only with `trust_remote_code`, and only where the folder has no tokenizer.json.
    """
    try:
        if (file := folder / "tokenizer.json").is_file():
            return _first_equal(
                folder, _tokenizers_reference(check_regular(file)), (AutoTokenizer, PreTrainedTokenizerFast)
            )
        values = _read_tokenizer_config(folder)
        own_class = _own_class(values)
        if own_class and trust_remote_code:
            return _checked(AutoTokenizer.from_pretrained(str(folder), trust_remote_code=True), None)
        if (file := folder / TIKTOKEN).is_file():
            check_regular(file)
            return _read_tiktoken(folder, values, own_class)
        if (file := folder / "tokenizer.model").is_file() and (
            reference := _sentencepiece_reference(check_regular(file))
        ):
            return _first_equal(folder, reference, (AutoTokenizer, LlamaTokenizer))
        if own_class:
            raise _needs_code(folder, own_class)
        return _checked(_load(AutoTokenizer, folder), None)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # libraries and trusted code raise of every kind
        raise UserError(f"{folder}: the tokenizer cannot be read ({one_line(error, 200)})") from error


def text_difference(tokenizer: Any, reference: Reference | None) -> str:
    """Describe the first text that a tokenizer reads or writes otherwise than its file; "" if none."""
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


def _first_equal(folder: Path, reference: Reference, classes: tuple[Any, ...]) -> PreTrainedTokenizerBase:
    """Load with the first class that agrees with the reference."""
    for cls in classes[:-1]:
        try:
            return _checked(_load(cls, folder), reference)
        except Exception as error:  # noqa: BLE001 - its libraries raise of every kind, and the next one may do
            LOGGER.info("%s: %s is not used: %s", folder, cls.__name__, one_line(error, 200))
    return _checked(_load(classes[-1], folder), reference)


def _load(cls: Any, folder: Path) -> Any:
    tokenizer = cls.from_pretrained(str(folder), trust_remote_code=False, clean_up_tokenization_spaces=False)
    tokenizer.init_kwargs.pop("auto_map", None)  # a copy would name code that it does not have
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


def _tokenizers_reference(file: Path) -> Reference:
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


def _sentencepiece_reference(file: Path) -> Reference | None:
    """Return SentencePiece's reading of a file; None without the library, or for a file of another kind."""
    try:
        from sentencepiece import SentencePieceProcessor

        own = SentencePieceProcessor(model_file=str(file))
    except (ImportError, RuntimeError):
        return None
    texts = tuple(text.lstrip() for text in PROBES)  # transformers puts no blank before one that begins a text
    return Reference(file, texts, lambda text: list(own.encode(text)), lambda ids: str(own.decode(ids)))


def _read_tokenizer_config(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    values = read_json(file) if file.exists() else {}
    if not isinstance(values, dict):
        raise UserError(f"{file}: expected an object of settings, found {type(values).__name__}: copy it again")
    return values


def _own_class(values: dict[str, Any]) -> str:
    """Return module and name of the tokenizer class that the folder ships as Python code; "" where it ships none."""
    named = values.get("auto_map") or ()
    named = named.get("AutoTokenizer") or () if isinstance(named, dict) else named
    named = [named] if isinstance(named, str) else named
    return next((str(name) for name in reversed(named) if name), "")


def _needs_code(folder: Path, own_class: str) -> UserError:
    if not own_class:
        return UserError(
            f"{folder}: {TIKTOKEN} does not say how text is split, and tokenizer_config.json names no class that does: "
            "save the tokenizer as tokenizer.json"
        )
    return UserError(
        f"{folder}: the tokenizer is Python code of the folder ({own_class}), which does not run: read it and set "
        "model.trust_remote_code=true, or save the tokenizer as tokenizer.json"
    )


# -- tiktoken ------------------------------------------------------------------------------------------------


def _read_tiktoken(folder: Path, values: dict[str, Any], own_class: str) -> PreTrainedTokenizerBase:
    """Read tiktoken.model with the pattern of the folder's class and the tokens of tokenizer_config.json."""
    pattern, declared = split_pattern(folder, own_class), values.get("added_tokens_decoder")
    if not pattern or not declared:
        raise _needs_code(folder, own_class)
    if "def apply_chat_template(" in read_text(_source(folder, own_class)):
        LOGGER.warning(
            "%s: the chat template alone renders chats; %s, which does not run, may change schemas of tools",
            folder,
            own_class,
        )
    tokenizer = _load(PreTrainedTokenizerFast, folder)
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    # Read again: transformers adds every token as special first, and a token once special stays so.
    tokenizer._tokenizer = Tokenizer.from_str(backend.to_str())
    special = {str(token["content"]): int(number) for number, token in declared.items()}
    for token in {*special, *tokenizer.all_special_tokens}:
        if special.get(token) != (number := tokenizer.convert_tokens_to_ids(token)):
            raise UserError(
                f"{folder}: {shorten(repr(token))} is token {number}, and not so in added_tokens_decoder of "
                "tokenizer_config.json: copy the tokenizer's files again"
            )
    return _checked(tokenizer, _tiktoken_reference(folder / TIKTOKEN, pattern, special))


def _tiktoken_reference(file: Path, pattern: str, special: dict[str, int]) -> Reference:
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe

    ranks = load_tiktoken_bpe(str(file))
    own = tiktoken.Encoding(file.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    return Reference(file, (*PROBES, _between(special)), partial(own.encode, allowed_special="all"), own.decode)


def _source(folder: Path, own_class: str) -> Path:
    return folder / f"{own_class.partition('.')[0]}.py"


def split_pattern(folder: Path, own_class: str) -> str | None:
    """Return the pattern that a class gives to tiktoken, read from its source; None where it must run to say it."""
    file = _source(folder, own_class)
    if not own_class or "--" in own_class or not file.is_file():
        return None
    try:
        tree = ast.parse(read_text(file))
        values: dict[str, list[ast.expr]] = {}
        given = list[ast.expr]()
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    values.setdefault(ast.unparse(target).rpartition(".")[2], []).append(node.value)
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Encoding"):
                given += [word.value for word in node.keywords if word.arg == "pat_str"]
        (pattern,) = given
        return _text(pattern, values)
    except (SyntaxError, ValueError, RecursionError):
        return None


def _text(node: ast.expr, values: dict[str, list[ast.expr]]) -> str:
    """Return the text of an expression of literals. Raises ValueError where it is more than that."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id=name) | ast.Attribute(attr=name):
            (value,) = values.get(name, [])  # assigned once
            return _text(value, values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left, values) + _text(right, values)
        case ast.Call(
            func=ast.Attribute(value=between, attr="join"), args=[ast.List(elts=parts) | ast.Tuple(elts=parts)]
        ):
            return _text(between, values).join(_text(part, values) for part in parts)
    raise ValueError(f"{type(node).__name__} is no literal")
