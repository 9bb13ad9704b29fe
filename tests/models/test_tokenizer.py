"""Tokenizers of model folders beside the libraries of their files: tokenizers, SentencePiece, tiktoken."""

import base64
import json
from collections.abc import Callable, Iterable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.tokenizer import PROBES, load_tokenizer, read_tokenizer
from grpo_mp.utils.errors import UserError

TEXTS = [*PROBES, "Tom has 12 red apples, 3 pears.", "for i in range(10):\n    print(i, end=' ')", "Il a été là."] * 3
TEMPLATE = "{% for message in messages %}<|user|>{{ message['content'] }}{% endfor %}"
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
ENDS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + ENDS
QWEN_2 = LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
WORD = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]%s[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]%s(?i:'s|'t)?"
)
PARTS = [r"[\p{Han}]+", WORD % ("*", "+"), WORD % ("+", "*"), r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*"]
PARTS += [r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"]
KIMI = "|".join(PARTS)


def by_bytes(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


SPLITTERS = {
    "GPT-2": by_bytes(GPT_2),
    "Llama 3": by_bytes(LLAMA_3),
    "Qwen2": by_bytes(QWEN_2),
    "Kimi": by_bytes(KIMI),
    "capitals": by_bytes(LLAMA_3.replace(r"\p{L}+", r"\p{Lu}*\p{Ll}+|\p{Lu}+|\p{L}+")),
    "single blanks": by_bytes(LLAMA_3.replace(r"|\s+(?!\S)|\s+", r"|\s")),
    "letters of ASCII": by_bytes(LLAMA_3.replace(r"\p{L}", "a-zA-Z")),
    "whole text": pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    "blank before": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "SentencePiece": pre_tokenizers.Metaspace(prepend_scheme="first"),
    "SentencePiece, no blank before": pre_tokenizers.Metaspace(prepend_scheme="never"),
    "words": pre_tokenizers.Whitespace(),
    "emoji apart": by_bytes(r"\p{Extended_Pictographic}|" + LLAMA_3),
}


@pytest.mark.parametrize("names", [*combinations(SPLITTERS, 2)], ids="-".join)
def test_the_texts_tell_any_two_splitters_apart(names: tuple[str, str]) -> None:
    one, other = ([SPLITTERS[name].pre_tokenize_str(text) for text in PROBES] for name in names)
    assert one != other


def train(pre_tokenizer: Any, decoder: Any, **model: Any) -> Tokenizer:
    own = Tokenizer(models.BPE(**model))
    own.pre_tokenizer, own.decoder = pre_tokenizer, decoder
    letters = pre_tokenizers.ByteLevel.alphabet()
    special = ["<unk>", "<s>", "</s>", "<|user|>"]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, initial_alphabet=letters, show_progress=False)
    own.train_from_iterator(TEXTS, trainer)
    return own


def write(folder: Path, model_type: str, own: Tokenizer | None = None, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 4096}))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens | {"chat_template": TEMPLATE} | config))
    if own:
        own.save(str(folder / "tokenizer.json"))
    return folder


def same(tokenizer: Any, encode: Callable[[str], list[int]], texts: Iterable[str] = TEXTS) -> bool:
    return all(tokenizer(text, add_special_tokens=False)["input_ids"] == encode(text) for text in texts)


# -- tokenizer.json ------------------------------------------------------------------------------------------

FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "mistral",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "new",
)
CLASSES = (
    "LlamaTokenizerFast",
    "LlamaTokenizer",
    "PreTrainedTokenizerFast",
    "Qwen2Tokenizer",
    "GPT2Tokenizer",
    "Own",
    None,
)


@pytest.mark.parametrize("splitter", ["Kimi", "Qwen2", "SentencePiece"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_file_is_read_whatever_class_is_named(splitter: str, model_type: str, tmp_path: Path) -> None:
    by_blank = splitter == "SentencePiece"
    own = train(SPLITTERS[splitter], decoders.Metaspace() if by_blank else decoders.ByteLevel(), unk_token="<unk>")
    for name in CLASSES:
        folder = write(tmp_path / "model", model_type, own, **({"tokenizer_class": name} if name else {}))
        read = read_tokenizer(folder, HfConfig.read(folder))
        assert same(read, lambda text: list(own.encode(text, add_special_tokens=False).ids)), name
        for text in TEXTS:
            ids = own.encode(text, add_special_tokens=False).ids
            assert read.decode(ids) == own.decode(ids, skip_special_tokens=False)
        assert (read.bos_token_id, read.eos_token_id, read.chat_template) == (1, 2, TEMPLATE), name
        assert read("<|user|>x</s>", add_special_tokens=False)["input_ids"][::2] == [3, 2]


def test_code_beside_a_tokenizer_file_does_not_run(tmp_path: Path) -> None:
    own = train(SPLITTERS["Kimi"], decoders.ByteLevel())
    for model_type in ("llama", "deepseek_v3", "new"):
        names = ["tokenization_own.Own", None]
        folder = write(tmp_path / "model", model_type, own, auto_map={"AutoTokenizer": names}, tokenizer_class="Own")
        (folder / "tokenization_own.py").write_text("raise SystemExit('code ran')\n")
        for trusted in (False, True):
            assert same(load_tokenizer(folder, trusted), lambda text: list(own.encode(text).ids))


def test_a_difference_that_remains_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "model", "llama", train(SPLITTERS["Kimi"], decoders.ByteLevel()))
    other = train(SPLITTERS["Qwen2"], decoders.ByteLevel())
    monkeypatch.setattr("grpo_mp.models.tokenizer.Tokenizer", type("Other", (), {"from_file": lambda file: other}))
    with pytest.raises(UserError, match=r"which differs from tokenizer.json: .* becomes .*: save the tokenizer as"):
        load_tokenizer(folder)


def test_a_token_without_an_embedding(tmp_path: Path) -> None:
    own = train(SPLITTERS["Kimi"], decoders.ByteLevel())
    folder, count = write(tmp_path / "model", "llama", own), own.get_vocab_size()
    for added, size, is_refused in ((), count, False), ((), count - 1, True), (("<|reserved_9|>",), count, False):
        own.add_special_tokens([*added])
        own.save(str(folder / "tokenizer.json"))
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": size}))
        if is_refused:
            with pytest.raises(
                UserError, match=f"the tokenizer has {count} tokens, config.json says vocab_size {size}"
            ):
                read_tokenizer(folder, HfConfig.read(folder))
        else:
            read_tokenizer(folder, HfConfig.read(folder))


# -- SentencePiece -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_sentencepiece_model_alone(model_type: str, tmp_path: Path) -> None:
    library = pytest.importorskip("sentencepiece")
    (tmp_path / "texts").write_text("\n".join(text for text in TEXTS * 20))
    library.SentencePieceTrainer.train(
        **{"input": str(tmp_path / "texts"), "model_prefix": str(tmp_path / "own"), "vocab_size": 500},
        **{"model_type": "bpe", "byte_fallback": True, "split_digits": True, "minloglevel": 3},
        **{"normalization_rule_name": "identity", "remove_extra_whitespaces": False},
    )
    folder = write(tmp_path / "model", model_type, tokenizer_class="LlamaTokenizer", unk_token="<unk>")
    (tmp_path / "own.model").rename(folder / "tokenizer.model")
    own = library.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    assert same(load_tokenizer(folder), own.encode, [text.lstrip() for text in TEXTS])


# -- tiktoken ------------------------------------------------------------------------------------------------

IMPORTS = "import tiktoken\nraise SystemExit('code ran')\n"
SOURCES = {
    "joined": f"class Own:\n    pat_str = '|'.join({PARTS!r})\n    def load(self, ranks):\n"
    "        self.model = tiktoken.Encoding(name='x', pat_str=self.pat_str, mergeable_ranks=ranks)\n",
    "a constant": f"PATTERN = {KIMI!r}\nclass Own:\n    def load(self, ranks):\n"
    "        self.model = tiktoken.Encoding('x', pat_str=PATTERN, mergeable_ranks=ranks)\n",
    "in place": "from tiktoken import Encoding\nOwn = lambda ranks: Encoding('x', pat_str="
    f"{PARTS[0]!r} '|' {'|'.join(PARTS[1:4])!r} + {'|' + '|'.join(PARTS[4:])!r}, mergeable_ranks=ranks)\n",
}
RUNS = """
from pathlib import Path
import tiktoken
from tiktoken.load import load_tiktoken_bpe
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.tokenization_utils import PreTrainedTokenizer

class Own(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tiktoken.model"}

    def __init__(self, vocab_file, added_tokens_decoder=None, **kwargs):
        special = {token.content: number for number, token in added_tokens_decoder.items()}
        ranks = load_tiktoken_bpe(vocab_file)
        last = max(special.values())
        special |= {f"<|reserved_{i}|>": i for i in range(len(ranks), last) if i not in added_tokens_decoder}
        self.own = tiktoken.Encoding("own", pat_str=(lambda: %r)(), mergeable_ranks=ranks, special_tokens=special)
        self.letters = bytes_to_unicode()
        self.bytes = {letter: byte for byte, letter in self.letters.items()}
        super().__init__(added_tokens_decoder=added_tokens_decoder, **kwargs)

    @property
    def vocab_size(self):
        return self.own.n_vocab

    def get_vocab(self):
        return {self._convert_id_to_token(number): number for number in range(self.own.n_vocab)}

    def _tokenize(self, text, **kwargs):
        return [self._convert_id_to_token(number) for number in self.own.encode(text, disallowed_special=())]

    def _convert_token_to_id(self, token):
        return self.own._mergeable_ranks.get(bytes(self.bytes[letter] for letter in token))

    def _convert_id_to_token(self, number):
        return "".join(self.letters[byte] for byte in self.own.decode_single_token_bytes(number))

    def convert_tokens_to_string(self, tokens):
        return bytes(self.bytes[letter] for letter in "".join(tokens)).decode(errors="replace")
"""


@pytest.fixture
def make_tiktoken(tmp_path: Path) -> Callable[..., tuple[Path, tiktoken.Encoding]]:
    """Writes a folder in the form of Kimi-K2 and Moonlight, with the class's source; returns tiktoken's own, too."""

    def make(source: str, model_type: str = "kimi_k2", **config: Any) -> tuple[Path, tiktoken.Encoding]:
        letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
        trained = Tokenizer(models.BPE())
        trained.pre_tokenizer = SPLITTERS["Kimi"]
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trained.train_from_iterator(
            TEXTS, trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
        )
        numbers = sorted(trained.get_vocab().items(), key=lambda item: item[1])
        ranks = {bytes(letters[letter] for letter in token): number for token, number in numbers}
        first = len(ranks)
        special = {"<s>": first, "</s>": first + 1, "<|user|>": first + 2, "<|call|>": first + 5, "[PAD]": first + 9}
        flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
        added = {number: {"content": name, "special": name != "<|call|>"} | flags for name, number in special.items()}
        folder = write(
            tmp_path / "model",
            model_type,
            **{"tokenizer_class": "Own", "added_tokens_decoder": added, "pad_token": "[PAD]"},
            **{"auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}} | config,
        )
        lines = (f"{base64.b64encode(piece).decode()} {number}\n" for piece, number in ranks.items())
        (folder / "tiktoken.model").write_text("".join(lines))
        (folder / "tokenization_own.py").write_text(source)
        return folder, tiktoken.Encoding("own", pat_str=KIMI, mergeable_ranks=ranks, special_tokens=special)

    return make


MakeTiktoken = Callable[..., tuple[Path, tiktoken.Encoding]]


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("model_type", ["kimi_k2", "deepseek_v3"])
def test_the_pattern_of_a_class_is_read_and_its_code_does_not_run(
    name: str, model_type: str, make_tiktoken: MakeTiktoken
) -> None:
    folder, own = make_tiktoken(IMPORTS + SOURCES[name], model_type)
    read = read_tokenizer(folder, HfConfig.read(folder))
    assert same(read, own.encode)
    for text in TEXTS:
        assert read.decode(own.encode(text)) == text
    assert read.is_fast
    assert (read.bos_token_id, read.eos_token_id) == (own.encode_single_token("<s>"), own.n_vocab - 9)
    marked = read("<|user|>DataBase<|call|>x</s>", add_special_tokens=False)["input_ids"]
    assert marked == own.encode("<|user|>DataBase<|call|>x</s>", allowed_special="all")
    assert read.decode(marked, skip_special_tokens=True) == "DataBase<|call|>x"  # declared as text


def test_trusted_code_runs(make_tiktoken: MakeTiktoken, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder, own = make_tiktoken(RUNS % KIMI)
    with pytest.raises(UserError, match=r"set model.trust_remote_code=true"):
        load_tokenizer(folder)
    assert same(load_tokenizer(folder, trust_remote_code=True), own.encode)
    (folder / "tokenization_own.py").write_text(IMPORTS)
    with pytest.raises(UserError, match=r"the tokenizer cannot be read \(code ran\)"):
        load_tokenizer(folder, trust_remote_code=True)
