"""Prompts of later turns, over the chat templates of the supported families: sampled ids stay.

The templates are the published ones as TRL keeps them. Of those that it lacks the essentials are written here: what
begins and ends a turn, how calls and results look, which thinking is stripped. The rest is as transformers renders it
in the full conversation. Where GRPO_MP_CHAT_TEMPLATES names a folder with NAME.jinja, as a model's folder has it, that
is tested in their place.
"""

import asyncio
import importlib.util
import os
from contextlib import nullcontext, suppress
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grpo_mp.config.sections import EpisodeLimits
from grpo_mp.data.template import MARK, ChatRenderer
from grpo_mp.data.template_date import set_template_date
from grpo_mp.rollout.client import SamplingParams
from grpo_mp.rollout.episode_policy import EpisodeContext, EpisodePolicy, EpisodeWatch
from grpo_mp.rollout.protocol import Episode
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.types import Message, Prompt
from tests.rollout.engineless import TextClient

KIMI_K2 = (
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for message in messages %}{% if loop.first and message.role != 'system' %}"
    "<|im_system|>system<|im_middle|>You are a helpful assistant<|im_end|>{% endif %}"
    "{% if message.role == 'system' %}<|im_system|>system<|im_middle|>{% elif message.role == 'user' %}"
    "<|im_user|>user<|im_middle|>{% elif message.role == 'assistant' %}<|im_assistant|>assistant<|im_middle|>"
    "{% elif message.role == 'tool' %}<|im_system|>tool<|im_middle|>{% endif %}"
    "{% if message.role == 'assistant' and message.get('tool_calls') %}{{ message.content or '' }}"
    "<|tool_calls_section_begin|>{% for call in message.tool_calls %}<|tool_call_begin|>{{ call.id }}"
    "<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
    "<|tool_calls_section_end|>{% elif message.role == 'tool' %}## Return of {{ message.tool_call_id }}\n"
    "{{ message.content }}{% else %}{{ message.content }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
MIXTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if message.role == 'user' %}"
    "{{ ' [INST] ' + message.content + ' [/INST]' }}{% else %}{{ ' ' + message.content + eos_token }}{% endif %}"
    "{% endfor %}"
)
DEEPSEEK_V2 = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %}"
    "{{ 'Assistant: ' + message.content + eos_token }}{% else %}"
    "{{ ('User: ' if message.role == 'user' else '') + message.content + '\\n\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
DEEPSEEK = "<｜end▁of▁sentence｜>"


def deepseek(call: str, outputs: tuple[str, str], answered: str, asks: str) -> str:
    """The essentials of a later DeepSeek template: thinking of all turns is stripped, tools are not shown.

    `call`: what is between the tokens of a call; `outputs`: around the results; `answered`, `asks`: what opens a turn.
    """
    begin, end = outputs
    return (
        "{{ bos_token }}{% set ns = namespace(open=false) %}{% for message in messages %}"
        "{% set goes_on = loop.previtem is defined and loop.previtem.role == 'tool' %}"
        f"{{% if ns.open and message.role != 'tool' %}}{end}{{% set ns.open = false %}}{{% endif %}}"
        "{% if message.role == 'user' %}<｜User｜>{{ message.content }}{% elif message.role == 'assistant' %}"
        f"{{% if not goes_on %}}{answered}{{% endif %}}{{{{ (message.content or '').split('</think>')[-1].strip() }}}}"
        "{% if message.get('tool_calls') %}<｜tool▁calls▁begin｜>{% for call in message.tool_calls %}"
        f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>{{% endfor %}}<｜tool▁calls▁end｜>{{% endif %}}{DEEPSEEK}"
        f"{{% elif message.role == 'tool' %}}{{% if not ns.open %}}{begin}{{% set ns.open = true %}}{{% endif %}}"
        "<｜tool▁output▁begin｜>{{ message.content }}<｜tool▁output▁end｜>{% else %}{{ message.content }}{% endif %}"
        f"{{% endfor %}}{{% if ns.open %}}{end}{{% elif add_generation_prompt %}}{asks}{{% endif %}}"
    )


NAME = "{{ call.function.name }}"
ARGUMENTS = "{{ call.function.arguments }}"
ASSISTANT = "<｜Assistant｜>"
DEEPSEEK_R1_0528 = deepseek(
    f"function<｜tool▁sep｜>{NAME}\n```json\n{ARGUMENTS}\n```",
    ("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
    *(ASSISTANT, ASSISTANT),
)
DEEPSEEK_R1 = DEEPSEEK_R1_0528.replace("message.get('tool_calls')", "message.content is none")
DEEPSEEK_V3_1 = deepseek(  # as with thinking=true
    f"{NAME}<｜tool▁sep｜>{ARGUMENTS}", ("", ""), f"{ASSISTANT}</think>", f"{ASSISTANT}<think>"
)
QWEN3_THINKS = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
ENDS = {  # the stop token of an answer, and of a call: what the model samples last
    "qwen2_5": ("<|im_end|>", "<|im_end|>"),
    "qwen3": ("<|im_end|>", "<|im_end|>"),
    "qwen3_instruct_2507": ("<|im_end|>", "<|im_end|>"),
    "qwen3_thinking_2507": ("<|im_end|>", "<|im_end|>"),
    "deepseek_v2": (DEEPSEEK, None),
    "deepseekv3": (DEEPSEEK, DEEPSEEK),
    "deepseek_r1": (DEEPSEEK, DEEPSEEK),
    "deepseek_r1_0528": (DEEPSEEK, DEEPSEEK),
    "deepseek_v3_1": (DEEPSEEK, DEEPSEEK),
    "deepseek_r1_distill": (DEEPSEEK, None),  # the template leaves the end of a single call out
    "glm4moe": ("<|user|>", "<|observation|>"),
    "llama3": ("<|eot_id|>", None),
    "llama3_1": ("<|eot_id|>", "<|eot_id|>"),
    "llama3_2": ("<|eot_id|>", "<|eot_id|>"),
    "kimi_k2": ("<|im_end|>", "<|im_end|>"),  # and Moonlight, which has no tools
    "mixtral": ("</s>", None),
    "gptoss": ("<|return|>", "<|call|>"),
}
GOES_ON = {"gptoss": "<|end|>"}  # in the place of the stop token, where the conversation goes on
ONE_CALL = ("llama3", "gptoss")  # of an answer, by the first letters of names
HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>")
CALLING = [name for name, (_, end) in ENDS.items() if end]
LATER_DEEPSEEK = ["deepseek_r1", "deepseek_r1_0528", "deepseek_v3_1"]
STRIPPING = ["qwen3", "qwen3_thinking_2507", "deepseekv3", *LATER_DEEPSEEK, "deepseek_r1_distill", "glm4moe"]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
}
ASK: Message = {"role": "user", "content": "How many?"}
MORE: Message = {"role": "user", "content": "And now?"}
ANSWER: Message = {"role": "assistant", "content": "Seven."}
RESULT: Message = {"role": "tool", "tool_call_id": "functions.add:0", "name": "add", "content": "4"}


def call_of(name: str) -> Message:
    arguments: Any = '{"a": 1}' if name.startswith("deepseek") else {"a": 1}
    call = {"id": "functions.add:0", "type": "function", "function": {"name": "add", "arguments": arguments}}
    content = None if name == "deepseek_r1" else ""  # beside which alone it writes calls
    return {"role": "assistant", "content": content, "tool_calls": [call]}


ESSENTIALS = {
    "kimi_k2": KIMI_K2,
    "mixtral": MIXTRAL,
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_r1": DEEPSEEK_R1,
    "deepseek_r1_0528": DEEPSEEK_R1_0528,
    "deepseek_v3_1": DEEPSEEK_V3_1,
}


@pytest.fixture(autouse=True)
def today() -> None:
    """Set the present date, which the library writes, also after midnight."""
    set_template_date(date.today())


def make_renderer(name: str, tools: bool) -> ChatRenderer:
    special = {end for ends in ENDS.values() for end in ends if end} | {"<s>", "<|im_start|>", "<|assistant|>"}
    special |= {*HARMONY} if name == "gptoss" else set()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    eos = ENDS[name][0]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token=eos, additional_special_tokens=sorted(special - {eos})
    )
    given = Path(os.environ.get("GRPO_MP_CHAT_TEMPLATES", "."), f"{name}.jinja")
    fast.chat_template = (
        given.read_text(encoding="utf-8") if given.exists() else ESSENTIALS.get(name) or published(name)
    )
    return ChatRenderer(fast, (TOOL,) if tools else ())


def published(name: str) -> str:
    package = importlib.util.find_spec("trl")
    if package is None or not package.origin:
        pytest.skip("TRL is not installed")
    folder = Path(package.origin).parent / "chat_templates"
    if name == "qwen3_thinking_2507":  # differs from Qwen3's in what opens an answer
        return (folder / "qwen3.jinja").read_text(encoding="utf-8").partition("{%- if add_generation")[0] + QWEN3_THINKS
    return (folder / f"{name}.jinja").read_text(encoding="utf-8")


def rendered(renderer: ChatRenderer, *messages: Message) -> str:
    text = renderer.tokenizer.apply_chat_template(
        list(messages), tools=list(renderer.tools) or None, tokenize=False, add_generation_prompt=True
    )
    assert isinstance(text, str)
    return text


def sequence(renderer: ChatRenderer, prompt: str, sampled: str, *new: Message, calls: Any = ()) -> str:
    """The text of prompt, sampled ids and what follows them; the sampled ids are kept."""
    ids = renderer.tokenizer.encode(sampled, add_special_tokens=False)
    return prompt + sampled + renderer.tokenizer.decode(renderer.continuation(ids, new, calls))


@pytest.mark.parametrize("name", ENDS)
def test_the_next_question_is_rendered_as_in_the_full_conversation(name: str) -> None:
    renderer = make_renderer(name, tools=False)
    full = rendered(renderer, ASK, ANSWER, MORE)
    prompt = rendered(renderer, ASK)
    opening = full[: full.index("Seven.")]
    sampled = f"Seven.{ENDS[name][0]}"
    # What the template writes before an answer, such as an empty <think>, is the policy's to sample, or not.
    assert sequence(renderer, opening, sampled, MORE) == full.replace(f"Seven.{GOES_ON.get(name)}", sampled)
    assert renderer.tokenizer.decode(renderer.prompt([ASK])) == prompt


@pytest.mark.parametrize("name", CALLING)
def test_the_result_of_a_tool_is_rendered_as_in_the_full_conversation(name: str) -> None:
    renderer = make_renderer(name, tools=True)
    full = rendered(renderer, ASK, call_of(name), RESULT)
    prompt = rendered(renderer, ASK)
    end = ENDS[name][1] or ""
    # Some open an answer with a <think> that they do not keep.
    start = len(prompt) if full.startswith(prompt) else prompt.rindex("<think>")
    sampled = full[start : full.index(end, start) + len(end)]
    assert "add" in sampled
    assert sequence(renderer, full[:start], sampled, RESULT, calls=call_of(name)["tool_calls"]) == full


@pytest.mark.parametrize("name", STRIPPING)
def test_templates_that_strip_thinking_change_nothing_that_was_sampled(name: str) -> None:
    renderer = make_renderer(name, tools=False)
    end = ENDS[name][0]
    thought = f"<think>\nThree and four.\n</think>\n\nSeven.{end}"
    answered: Message = {"role": "assistant", "content": thought.removesuffix(end)}
    assert "Three" not in rendered(renderer, ASK, answered, MORE)  # why the conversation is not rendered again
    prompt = rendered(renderer, ASK)
    full = rendered(renderer, ASK, ANSWER, MORE)
    assert (
        sequence(renderer, prompt, thought, MORE)
        == prompt + thought + full[full.index("Seven.") + len(f"Seven.{end}") :]
    )


@pytest.mark.parametrize("name", ENDS)
def test_an_answer_that_was_cut_is_ended(name: str) -> None:
    renderer = make_renderer(name, tools=False)
    end = ENDS[name][0]
    whole, cut = (sequence(renderer, "", text, MORE) for text in (f"Sev{end}", "Sev"))
    assert whole.replace(f"Sev{end}", f"Sev{GOES_ON.get(name, end)}") == cut


@pytest.mark.parametrize(
    "forged",
    [
        "<|im_<|im_end|>end|>",
        "<|im_<|im_<|im_end|>end|>end|>",
        "‹|User|›",  # added, and not special
        "<|start_header_id|>",  # special, and in none of the tokenizer's names
    ],
)
def test_no_text_of_others_becomes_an_added_token(forged: str) -> None:
    renderer = make_renderer("qwen3", tools=False)
    renderer.tokenizer.add_tokens(["‹|User|›", "    "])
    renderer.tokenizer.add_tokens(AddedToken("<|start_header_id|>", special=True))
    added = set(renderer.tokenizer.added_tokens_decoder) - {renderer.tokenizer.convert_tokens_to_ids("    ")}
    encode = partial(renderer.tokenizer.encode, add_special_tokens=False)
    assert added & set(encode(forged))
    assert not added & set(encode(renderer.clean(forged)))
    assert renderer.clean("if a:\n    b") == "if a:\n    b"


@pytest.mark.parametrize("name", [name for name in CALLING if not name.startswith(ONE_CALL)])
def test_an_episode_with_two_results_trains_on_what_was_sampled(name: str) -> None:
    """By the policy's handle: two calls in one answer, their results as the template writes both, an answer."""
    renderer = make_renderer(name, tools=True)
    end = ENDS[name][1] or ""
    (call,) = call_of(name)["tool_calls"]
    calls: Message = {**call_of(name), "tool_calls": [call, {**call, "id": "functions.add:1"}]}
    results: list[Message] = [
        {**RESULT, "tool_call_id": f"functions.add:{number}", "content": text}
        for number, text in enumerate(("twenty", "forty"))
    ]
    full = rendered(renderer, ASK, calls, *results)
    given = full[full.rindex(end, 0, full.index("twenty")) + len(end) :]
    client: Any = TextClient(renderer.tokenizer, [f"[add]({{}})[add]({{}}){end}", f"Seven.{ENDS[name][0]}"])
    limits = (EpisodeLimits(), SamplingParams(4000), 4000)
    prompt = Prompt(0, "", renderer.prompt([ASK]), messages=(ASK,))

    async def episode() -> Episode:
        async with asyncio.timeout(60) as clock:
            policy = EpisodePolicy(EpisodeContext(client, renderer, *limits, "any", None), prompt, EpisodeWatch(clock))
            turn = await policy.generate([ASK])
            assert [call.name for call in turn.tool_calls] == ["add", "add"]
            await policy.generate([ASK, turn.message, *results])
            return policy.episode()

    parts = asyncio.run(episode()).segments
    assert [part.generated for part in parts] == [False, True, False, True]
    texts = [renderer.tokenizer.decode(part.tokens) for part in parts]
    assert texts == [rendered(renderer, ASK), client.texts[0], given, client.texts[1]]


@pytest.mark.parametrize("name", ENDS)
def test_templates_are_checked_at_the_start(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Those for tools pass, DeepSeek-V3's, which leaves it to the prompt to name them, with a warning, as do others."""
    make_renderer(name, tools=False).check()
    with nullcontext() if name in CALLING else suppress(UserError):
        make_renderer(name, tools=True).check()
    warned = ["does not show tools" in record.getMessage() for record in caplog.records]
    assert warned == ([] if name in CALLING and name not in ("deepseekv3", *LATER_DEEPSEEK) else [True])


def test_a_template_that_drops_results_is_refused_at_the_start() -> None:
    renderer = make_renderer("qwen3", tools=True)
    template = "{{ tools }}{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}"
    renderer.tokenizer.chat_template = template
    with pytest.raises(UserError, match="leaves results of tools out \\(role tool\\)"):
        renderer.check()


def test_a_template_without_answers_is_refused() -> None:
    renderer = make_renderer("qwen3", tools=False)
    renderer.tokenizer.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    assert MARK not in rendered(renderer, ASK, ANSWER)
    with pytest.raises(UserError, match="leaves answers out"):
        renderer.continuation((), [MORE])
    strict = make_renderer("mixtral", tools=False)
    with pytest.raises(UserError, match="refuses messages of user, assistant, tool: roles must alternate"):
        strict.continuation((), [RESULT])
