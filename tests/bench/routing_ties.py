"""Where engine and model differ, was the routing tied? `python -m tests.bench.routing_ties MODEL_FOLDER [--tokens N]`.

Scores random sequences with an SGLang server and with transformers, and looks at every sequence with a token further
apart than 1e-3 nats. The routing margin of a token is the smallest gap, over all layers, between a score that was
chosen and one that was not (groups first, then experts). If the differences are routing ties, the first token apart of
each such sequence has a margin of float32 rounding, while an ordinary token's is a thousand times wider.
For a DeepSeek-V3-shaped folder, such as runs/quickstart/final.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Iterable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from grpo_mp.rollout.client import EngineClient
from grpo_mp.rollout.engine_args import EngineSpec
from tests.engines import started_engine

APART, LENGTH, BATCH = 1e-3, 64, 64


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=200_000)
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    count = args.tokens // LENGTH
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.config.vocab_size, (count, LENGTH), generator=generator)
    actual = torch.tensor(engine_scores(args.model, tokens))
    expected, margins = model_scores(model, tokens)
    report((actual - expected).abs(), margins)


def report(apart: Tensor, margins: Tensor) -> None:
    """apart [N, L - 1], margins [N, L - 1] of the tokens that each logprob was computed at."""
    far = (apart > APART).any(1)
    print(f"{apart.numel()} tokens: mean |engine - model| {apart.mean():.2e}; in sequences without a far one "
          f"{apart[~far].mean():.2e}")  # fmt: skip
    print(f"median routing margin {margins.median():.1e}; margins below 1e-6: {int((margins < 1e-6).sum())} tokens")
    for row in far.nonzero()[:, 0].tolist():
        first = int((apart[row] > APART).nonzero()[0])
        print(f"sequence {row}: first far token {first}, {apart[row].max():.2g} nats at most, "
              f"smallest margin up to it {margins[row, : first + 1].min():.1e}")  # fmt: skip


def engine_scores(folder: Path, tokens: Tensor) -> list[list[float]]:
    """Logprobs [N, L - 1] by a server started for this."""

    async def score(url: str, headers: dict[str, str]) -> list[list[float]]:
        async with aclosing(EngineClient(0, url, headers, 600.0)) as client:
            return [row for batch in tokens.split(BATCH) for row in await client.score(batch.tolist())]

    with tempfile.TemporaryDirectory() as scratch:
        spec = EngineSpec(index=0, rank=0, model=folder, dtype="float32", context_tokens=LENGTH + 1, cpu=True)
        with started_engine(spec, Path(scratch) / "engine.log") as engine:
            engine.wait_ready(300.0)
            return asyncio.run(score(engine.url, engine.headers))


@torch.no_grad()
def model_scores(model: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Logprobs and routing margins, [N, L - 1] each."""
    seen: list[Tensor] = []
    for module in model.modules():
        if type(module).__name__ == "DeepseekV3TopkRouter":
            module.register_forward_hook(lambda router, args, _: seen.append(margin(router, args[0])))
    logprobs, margins = [], []
    for batch in tokens.split(BATCH):
        seen.clear()
        table = model(batch).logits[:, :-1].log_softmax(-1)
        logprobs.append(table.gather(2, batch[:, 1:, None])[..., 0])
        margins.append(smallest(seen).view(len(batch), LENGTH)[:, :-1])
    return torch.cat(logprobs), torch.cat(margins)


def margin(router: Any, hidden: Tensor) -> Tensor:
    """[T]: the gap between the worst chosen and the best refused, of groups and of experts in the chosen groups."""
    logits = hidden.view(-1, router.hidden_dim) @ router.weight.t()
    scores = logits.sigmoid() + router.e_score_correction_bias
    grouped = scores.view(len(scores), router.num_group, -1)
    groups = grouped.topk(2, dim=-1).values.sum(-1)
    kept = groups.topk(router.topk_group, dim=-1).indices
    inside = torch.full_like(groups, -torch.inf).scatter(1, kept, 0.0)[..., None] + grouped
    return smallest([gap(groups, router.topk_group), gap(inside.flatten(1), router.top_k)])


def gap(scores: Tensor, chosen: int) -> Tensor:
    """[T]: between the last chosen and the first refused; infinite where none is refused."""
    ordered = scores.sort(descending=True).values
    refused = ordered[:, chosen] if chosen < ordered.shape[1] else torch.full_like(ordered[:, 0], -torch.inf)
    return ordered[:, chosen - 1] - refused


def smallest(several: Iterable[Tensor]) -> Tensor:
    """Elementwise."""
    return torch.stack(list(several)).amin(0)


if __name__ == "__main__":
    main()
