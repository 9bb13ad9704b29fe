"""Tokenizers of model folders beside the library of their files."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.tokenizer import load_tokenizer, read_tokenizer
from grpo_mp.utils.errors import UserError

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
TEXTS = [*PROBES, "Tom has 12 red apples, 3 pears.", "for i in range(10):\n    print(i, end=' ')", "Il a été là."] * 3
TEMPLATE = "{% for message in messages %}<|user|>{{ message['content'] }}{% endfor %}"
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
    "Qwen2": by_bytes(QWEN_2),
    "Kimi": by_bytes(KIMI),
    "SentencePiece": pre_tokenizers.Metaspace(prepend_scheme="first"),
}


def train(pre_tokenizer: Any, decoder: Any, **model: Any) -> Tokenizer:
    own = Tokenizer(models.BPE(**model))
    own.pre_tokenizer = pre_tokenizer
    own.decoder = decoder
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

FAMILIES = ("llama", "qwen3_moe", "deepseek_v3", "new")
CLASSES = ("LlamaTokenizerFast", "PreTrainedTokenizerFast", "Qwen2Tokenizer", "Own", None)


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


def test_a_token_without_an_embedding(tmp_path: Path) -> None:
    own = train(SPLITTERS["Kimi"], decoders.ByteLevel())
    folder = write(tmp_path / "model", "llama", own)
    count = own.get_vocab_size()
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


# -- code of the folder --------------------------------------------------------------------------------------

CODE = """
from transformers import PreTrainedTokenizer

class Own(PreTrainedTokenizer):
    @property
    def vocab_size(self):
        return 256

    def get_vocab(self):
        return {f"b{number}": number for number in range(256)}

    def _tokenize(self, text, **kwargs):
        return [f"b{number}" for number in text.encode()]

    def _convert_token_to_id(self, token):
        return int(token[1:])

    def _convert_id_to_token(self, number):
        return f"b{number}"

    def convert_tokens_to_string(self, tokens):
        return bytes(int(token[1:]) for token in tokens).decode(errors="replace")
"""


def test_trusted_code_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    own = {"auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}, "tokenizer_class": "Own"}
    folder = write(tmp_path / "model", "kimi_k2", **own)
    (folder / "tokenization_own.py").write_text(CODE)
    with pytest.raises(UserError, match=r"set model.trust_remote_code=true"):
        load_tokenizer(folder)
    assert same(load_tokenizer(folder, trust_remote_code=True), lambda text: list(text.encode()))
    (folder / "tokenization_own.py").write_text("raise SystemExit('code ran')\n")
    with pytest.raises(UserError, match=r"the tokenizer cannot be read \(code ran\)"):
        load_tokenizer(folder, trust_remote_code=True)
