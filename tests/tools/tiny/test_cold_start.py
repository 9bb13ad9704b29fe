"""The cold start's examples: chats whose learned tokens are what the policy samples, and nothing else."""

from pathlib import Path

from grpo_mp.data.chat_data import ChatEncoder, ChatReader, load_held_out_chats, load_train_chats
from grpo_mp.data.template import ChatRenderer
from tools.tiny import products
from tools.tiny.arithmetic import make_problems, vocabulary_words
from tools.tiny.cold_start import HELD_OUT, NUM_HELD_OUT, cold_start_settings, write_examples
from tools.tiny.make import worked_examples
from tools.tiny.models import make_tokenizer

EXTRA = 40


def encoder(tokenizer: object) -> ChatEncoder:
    return ChatEncoder(tokenizer, "assistant", frozenset([tokenizer.eos_token_id]))  # type: ignore[arg-type, attr-defined]


def test_worked_examples_are_prompt_answer_and_end(tmp_path: Path) -> None:
    problems, _ = make_problems(NUM_HELD_OUT + EXTRA, 10, seed=0, largest=29)
    rows = worked_examples(problems, seed=0, slips=0.5)
    tokenizer = make_tokenizer(vocabulary_words())
    settings = cold_start_settings(tmp_path / "model", *write_examples(rows, tmp_path), seed=0, steps=9)
    train = load_train_chats(ChatReader(settings.data, settings.sft, encoder(tokenizer)))
    held_out = load_held_out_chats(ChatReader(settings.data, settings.sft, encoder(tokenizer)))[HELD_OUT]
    assert (len(train), len(held_out)) == (EXTRA, NUM_HELD_OUT)
    for number, row in enumerate(rows[:EXTRA]):
        question, answer = (message["content"] for message in row["messages"])
        assert train[number].prompt_tokens == ChatRenderer(tokenizer).prompt([row["messages"][0]])
        assert question == problems[number].question
        said = (*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id)
        assert (train[number].tokens, train[number].generated) == (said, ())
    pairs = zip(problems, rows, strict=True)
    right = [f"\\boxed{{{problem.result}}}" in row["messages"][1]["content"] for problem, row in pairs]
    assert 0 < sum(right[:EXTRA]) < EXTRA
    assert all(right[EXTRA:])


def test_calls_are_learned_and_what_the_calculator_says_is_not(tmp_path: Path) -> None:
    problems, _ = products.make_problems(NUM_HELD_OUT + EXTRA, 1, seed=0)
    rows = products.make_examples(problems, 0, NUM_HELD_OUT)
    tokenizer = products.tokenizer()
    settings = cold_start_settings(tmp_path / "model", *write_examples(rows, tmp_path), seed=0, steps=9)
    held_out = load_held_out_chats(ChatReader(settings.data, settings.sft, encoder(tokenizer)))[HELD_OUT]
    problem = problems[EXTRA]
    sample = held_out[0]
    a, b = problem.operands
    learned = [token for token, own in zip(sample.tokens, sample.generated, strict=True) if own]
    given = [token for token, own in zip(sample.tokens, sample.generated, strict=True) if not own]
    call = f'[calculator(expression="{a}*{b}")]'
    answer = f"\\boxed{{{a * b}}}"
    assert tokenizer.decode(learned) == f"{call}<|im_end|>{answer}<|im_end|>"
    assert tokenizer.decode(given) == f"<|tool|>{a * b}<|im_end|><|assistant|>"
    asked = f"<|system|>calculator<|im_end|><|user|>{problem.question}<|im_end|><|assistant|>"
    assert tokenizer.decode(list(sample.prompt_tokens)) == asked
