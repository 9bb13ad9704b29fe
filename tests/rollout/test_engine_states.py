"""Recurrent states of an engine: in the prefix cache, over pauses, when weights change, and however a batch is made."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_mp.config.sections import PauseMode
from grpo_mp.rollout.client import EngineClient, EngineOutput, SamplingParams
from grpo_mp.rollout.engine_args import EngineSpec
from grpo_mp.rollout.server import EngineProcess
from tests.engines import started_engine
from tests.rollout.conftest import START_TIMEOUT_S, Logprobs
from tests.rollout.test_client import PROMPT, generate_while, load_weights
from tests.rollout.test_sampling_seeds import draw_in_every_way
from tools.tiny.models import make_tiny, make_tokenizer

pytestmark = pytest.mark.slow
TOLERANCE = 1e-4
Ask = Callable[..., Any]
Folders = tuple[Path, Path]
Loaded = dict[int, Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Two random mixtures of experts with a gated delta net in the first layer. The engine begins with the first."""
    made = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    shape = {"num_hidden_layers": 2, "hidden_size": 64, "initializer_range": 0.2}
    for seed, folder in enumerate(made):
        make_tiny(folder, "qwen3_5_moe_text", make_tokenizer(["apples"]), seed, **shape)
    return made


@pytest.fixture(scope="module")
def engine(
    make_spec: Callable[..., EngineSpec], folders: Folders, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    """A deterministic engine."""
    spec = make_spec(model=folders[0], args={"enable_deterministic_inference": True})
    with started_engine(spec, tmp_path_factory.mktemp("run") / "engine.log") as process:
        process.wait_ready(START_TIMEOUT_S)
        yield process


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    """The folder of each version of the weights."""
    return {}


async def update(client: EngineClient, folder: Path, pause: PauseMode, loaded: Loaded) -> None:
    """Load weights as a run with schedule=async does, while requests are paused."""
    version = len(loaded) + 1
    loaded[version] = folder
    await client.pause_generation(pause)
    await client.begin_weight_update()
    await load_weights(client, folder)
    await client.end_weight_update(version, keep_cache=pause == "in_place")
    await client.continue_generation()


def check(prompt: Sequence[int], outputs: Sequence[EngineOutput], loaded: Loaded, expected: Logprobs) -> None:
    """Check the logprobs of responses against the models of the tokens' weight versions."""
    for output in outputs:
        text = [*prompt, *output.tokens]
        for version in set(output.weight_versions):
            rows = [row for row, other in enumerate(output.weight_versions) if other == version]
            reference = of_tokens(expected(loaded[version], text), text)[len(prompt) - 1 :][rows]
            assert (reference - torch.tensor(output.logprobs)[rows]).abs().max() < TOLERANCE


def of_tokens(table: torch.Tensor, text: Sequence[int]) -> torch.Tensor:
    """Return the logprob of each token of a text but the first."""
    return table[:-1].gather(1, torch.tensor(text[1:])[:, None])[:, 0]


def test_a_text_behind_a_cached_prefix_is_as_one_that_is_read(
    ask: Ask, folders: Folders, loaded: Loaded, expected_logprobs: Logprobs
) -> None:
    """After an update no state of the old weights is read."""
    found = list[tuple[list[int], list[EngineOutput], list[list[float]]]]()

    async def run(client: EngineClient) -> None:
        text = PROMPT
        for model in (0, 1, 0):
            await update(client, folders[model], "in_place", loaded)
            for _ in range(2):  # the second time it goes on with a response
                outputs = await client.generate(text, SamplingParams(12, ignore_eos=True), 2)
                found.append((text, outputs, await client.score([text])))
                text = [*text, *outputs[0].tokens, 7, 9]

    ask(run)
    cached = [[output.cached_tokens > 0 for output in outputs] for _, outputs, _ in found]
    assert cached == [[False, False], [True, True]] * 3
    for text, outputs, (scores,) in found:
        check(text, outputs, loaded, expected_logprobs)
        table = expected_logprobs(loaded[outputs[0].weight_versions[0]], text)
        assert (of_tokens(table, text) - torch.tensor(scores)).abs().max() < TOLERANCE


@pytest.mark.parametrize("pause", ["in_place", "retract"])
def test_requests_go_on_over_an_update(
    ask: Ask, folders: Folders, loaded: Loaded, expected_logprobs: Logprobs, pause: PauseMode
) -> None:
    """In place with the states that they have: the weights are loaded again. Retracted ones with those of new weights.

    Every update brings the other model then, so that no token fits the wrong one.
    """
    ask(lambda client: update(client, folders[0], "retract", loaded))

    async def action(client: EngineClient) -> None:
        current = folders.index(loaded[len(loaded)])
        await update(client, folders[current if pause == "in_place" else 1 - current], pause, loaded)

    group = generate_while(ask, action, lambda group: all(len(set(one.weight_versions)) == 2 for one in group))
    check(PROMPT, group, loaded, expected_logprobs)


def test_a_response_depends_on_its_seed_alone(ask: Ask) -> None:
    ways = ask(draw_in_every_way)
    assert len({tokens for tokens, _ in ways["alone"]}) == 4
    for name, way in ways.items():
        assert way == ways["alone"], name
