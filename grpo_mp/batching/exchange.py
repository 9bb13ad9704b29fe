"""Samples from the ranks that received them to the ranks that train on them.

Small numbers about every sample go to every rank, which makes the same plan from them; tokens travel once,
from their holder to the replica that wants them, as flat integer and float tensors.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from grpo_mp.types import Sample, SampleGroup, SampleInfo

HEADER = 5  # group id, index, prompt tokens, response tokens, truncated


def all_gather_sample_info(groups: Iterable[SampleGroup], group: dist.ProcessGroup) -> list[SampleInfo]:
    """Numbers of all samples of the job in the order of (group id, index), the same on every rank."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    mine = [_info(sample, held, rank) for held in groups for sample in held.samples]
    everyone: list[list[SampleInfo]] = [[] for _ in range(world_size)]
    dist.all_gather_object(everyone, mine, group=group)
    return sorted((info for infos in everyone for info in infos), key=lambda info: info.key)


def gather_groups(
    groups: Iterable[SampleGroup], wanted: Collection[int], group: dist.ProcessGroup
) -> list[SampleGroup]:
    """The wanted groups of all ranks with their texts, on rank 0, in the order of their ids; elsewhere an empty list.

    Every rank must call this.
    """
    mine = [one for one in groups if one.samples[0].group_id in wanted]
    everyone: list[list[SampleGroup]] | None = [[]] * dist.get_world_size(group) if dist.get_rank(group) == 0 else None
    dist.gather_object(mine, everyone, group=group, group_dst=0)
    return sorted((one for held in everyone or () for one in held), key=lambda one: one.samples[0].group_id)


def redistribute(
    groups: Iterable[SampleGroup],
    wanted: Mapping[int, Sequence[tuple[int, int]]],
    group: dist.ProcessGroup,
    replica: dist.ProcessGroup,
    replica_source: int,
) -> dict[tuple[int, int], Sample]:
    """Bring each sample to the replica that wants it. Every rank must call this.

    `wanted`: the source rank of every replica -> keys of its samples. Returns this replica's samples by key;
    text and reward parts stay with the holder.
    """
    held = {(sample.group_id, sample.index): sample for one in groups for sample in one.samples}
    ranks = range(dist.get_world_size(group))
    outgoing = [[held[key] for key in wanted.get(rank, ()) if key in held] for rank in ranks]
    whole = _all_to_all([_integers(samples) for samples in outgoing], torch.int64, group)
    real = _all_to_all([_floats(samples) for samples in outgoing], torch.float32, group)
    whole, real = _to_replica(whole, replica, replica_source), _to_replica(real, replica, replica_source)
    return {(sample.group_id, sample.index): sample for sample in _decode(whole, real)}


def _info(sample: Sample, held: SampleGroup, rank: int) -> SampleInfo:
    return SampleInfo(
        group_id=sample.group_id,
        index=sample.index,
        holder=rank,
        prompt_tokens=len(sample.prompt_tokens),
        response_tokens=len(sample.tokens),
        reward=sample.reward,
        truncated=sample.truncated,
        oldest_version=min(sample.weight_versions),
        reward_parts=sample.reward_parts,
        step_rewards=sample.step_rewards,
        prompt=held.prompt.index,
        finished=held.finished,
        versions_sum=sum(sample.weight_versions),
        right=sample.right,
    )


def _all_to_all(outgoing: Sequence[torch.Tensor], dtype: torch.dtype, group: dist.ProcessGroup) -> torch.Tensor:
    sizes = torch.tensor([len(piece) for piece in outgoing])
    incoming_sizes = torch.empty_like(sizes)
    dist.all_to_all_single(incoming_sizes, sizes, group=group)
    incoming = torch.empty(int(incoming_sizes.sum()), dtype=dtype)
    dist.all_to_all_single(
        incoming, torch.cat(list(outgoing)).to(dtype), incoming_sizes.tolist(), sizes.tolist(), group=group
    )
    return incoming


def _to_replica(values: torch.Tensor, replica: dist.ProcessGroup, source: int) -> torch.Tensor:
    if dist.get_world_size(replica) == 1:
        return values
    size = torch.tensor([len(values)])
    dist.broadcast(size, source, group=replica)
    if dist.get_rank() != source:
        values = torch.empty(int(size), dtype=values.dtype)
    dist.broadcast(values, source, group=replica)
    return values


def _integers(samples: Sequence[Sample]) -> torch.Tensor:
    numbers: list[int] = []
    for sample in samples:
        numbers += [sample.group_id, sample.index, len(sample.prompt_tokens), len(sample.tokens), sample.truncated]
        numbers += [*sample.prompt_tokens, *sample.tokens, *sample.weight_versions]
    return torch.tensor(numbers, dtype=torch.int64)


def _floats(samples: Sequence[Sample]) -> torch.Tensor:
    return torch.tensor([value for sample in samples for value in sample.rollout_logprobs], dtype=torch.float32)


def _decode(whole: torch.Tensor, real: torch.Tensor) -> list[Sample]:
    numbers, logprobs = whole.tolist(), real.tolist()
    samples, at, at_real = [], 0, 0
    while at < len(numbers):
        group_id, index, prompt, response, truncated = numbers[at : at + HEADER]
        end = at + HEADER + prompt + 2 * response
        tokens, at = numbers[at + HEADER : end], end
        samples.append(
            Sample(
                group_id=group_id,
                index=index,
                prompt_tokens=tuple(tokens[:prompt]),
                tokens=tuple(tokens[prompt : prompt + response]),
                rollout_logprobs=tuple(logprobs[at_real : at_real + response]),
                weight_versions=tuple(tokens[prompt + response :]),
                truncated=bool(truncated),
            )
        )
        at_real += response
    return samples
