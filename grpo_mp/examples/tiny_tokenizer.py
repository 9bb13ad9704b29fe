r"""A tokenizer for tiny models: single digits, ASCII characters, and whole words of the task it is made for.

Small on purpose: a tiny policy spends its parameters on layers, not on an embedding of words it never sees.
"""

from collections.abc import Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = "<|im_end|>"
PAD = "<|endoftext|>"
UNKNOWN = "<|unknown|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
BOXED = "\\boxed{"
# One digit at a time, so that arithmetic sees its columns; a word with the blank before it; any other character.
PIECES = r"\\boxed\{| ?[A-Za-z]+|[^A-Za-z]"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """Make a tokenizer of ASCII characters, `words` with and without a blank before, and the chat's special tokens.

    Any ASCII text round-trips; other characters become `<|unknown|>`. `save_pretrained` writes an ordinary folder.
    """
    tokenizer = Tokenizer(models.BPE(vocab=_vocabulary(words), merges=[], ignore_merges=True, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        additional_special_tokens=list(ROLES),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _vocabulary(words: Sequence[str]) -> dict[str, int]:
    """Map tokens to ids: the special tokens first, then the characters, then the words."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    character_tokens = [byte_level.pre_tokenize_str(chr(code))[0][0] for code in range(128)]
    space = character_tokens[ord(" ")]
    # A word that only begins a sentence is capital there; names occur in both places.
    word_tokens = [
        token for word in words for token in ((word, space + word) if word[0].isupper() else (space + word,))
    ]
    tokens = [PAD, END, UNKNOWN, *ROLES, *character_tokens, BOXED, *word_tokens]
    return {token: index for index, token in enumerate(dict.fromkeys(tokens))}
