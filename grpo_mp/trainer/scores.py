"""Logprobs of given token sequences from the policy, in any layout, known to every rank; and the engine check."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from grpo_mp.config import Settings
from grpo_mp.data.pack import context_index, gather_responses, pack, slice_context
from grpo_mp.data.schedule import MicroBatchPlan
from grpo_mp.data.updates import alignment
from grpo_mp.errors import UserError
from grpo_mp.policy.parallel import Parallel
from grpo_mp.policy.policy import Policy
from grpo_mp.rollout.rollout import Rollout
from grpo_mp.sync.check import TOLERANCE, CheckReport, compare
from grpo_mp.sync.diagnose import describe_difference
from grpo_mp.sync.weight_sync import WeightSync
from grpo_mp.types import Sample

Sequences = Sequence[tuple[int, ...]]


def policy_scores(policy: Policy, sequences: Sequences) -> list[list[float]]:
    """Logprob at temperature 1 of every token after the first of each sequence. Every rank must call this."""
    parallel, layout = policy.parallel, policy.parallel.layout
    align = alignment(layout)
    samples = {i: _as_sample(i, tokens) for i, tokens in enumerate(sequences)}
    lengths = tuple(-(-len(tokens) // align) * align for tokens in sequences)
    nothing = [0.0] * len(sequences)
    whole = pack(samples, nothing, nothing, MicroBatchPlan(tuple(samples), lengths), align)
    mine = slice_context(whole, layout.context, parallel.here.context)
    repeat = layout.pipeline if layout.virtual_pipeline else 1  # an interleaved schedule needs that many
    with policy.at_temperature(1.0):
        outputs = policy.logprobs([mine] * repeat)
    values = torch.zeros(whole.total_tokens)
    if outputs and parallel.here.tensor == parallel.here.data == 0:
        values[context_index(whole.lengths, layout.context, parallel.here.context)] = outputs[0][0].cpu()
    dist.all_reduce(values, group=parallel.host)
    return [response.tolist() for response in gather_responses(values, whole)]


def check_engines(
    settings: Settings, parallel: Parallel, rollout: Rollout, sequences: Sequences, expected: Sequence[Sequence[float]]
) -> CheckReport:
    """The worst engine's distance from what the policy expects of `sequences`. Every rank must call this.

    Raises EngineDisagreesError on every rank when an engine is further away than the tolerance.
    """
    everyone = torch.zeros(parallel.world_size, 3, dtype=torch.float64)
    if rollout.client:
        report = compare(rollout.call(rollout.client.score(sequences)), expected)
        everyone[parallel.rank] = torch.tensor([report.mean, report.largest, report.typical], dtype=torch.float64)
    dist.all_reduce(everyone, group=parallel.host)
    tolerance = settings.sync.check_tolerance or TOLERANCE[settings.model.dtype]
    for engine, rank in enumerate(rollout.hosts):
        found = CheckReport(*everyone[rank].tolist())
        if not found.passes(tolerance):
            raise EngineDisagreesError(
                f"after the weight sync engine {engine} (rank {rank}) disagrees with the policy: typical |logprob "
                f"difference| {found.typical:.3g}, mean {found.mean:.3g}, largest {found.largest:.3g}, allowed "
                f"{tolerance:g} (sync.check_tolerance)"
            )
    return CheckReport(*everyone.amax(dim=0).tolist())


def find_wrong_tensor(sync: WeightSync, version: int, parallel: Parallel, rollout: Rollout) -> str:
    """Push again and look which of an engine's tensors change. Every rank must call this; all get the answer."""

    def checksums() -> dict[str, str]:
        return rollout.call(rollout.client.checksums()) if rollout.client else {}

    before = checksums()
    sync.push(version)
    again = checksums()
    if rollout.client:
        rollout.call(rollout.client.overwrite_weights())
    sync.push(version)
    mine = describe_difference(before, again, checksums()) if rollout.client else ""
    found: list[str] = [""] * parallel.world_size
    dist.all_gather_object(found, mine, group=parallel.host)
    return "; ".join(f"engine {engine}: {found[rank]}" for engine, rank in enumerate(rollout.hosts))


class EngineDisagreesError(UserError):
    """An engine's logprobs are not the policy's."""


def _as_sample(number: int, tokens: tuple[int, ...]) -> Sample:
    response = tokens[1:]
    return Sample(number, 0, tokens[:1], response, (0.0,) * len(response), (0,) * len(response), truncated=False)
