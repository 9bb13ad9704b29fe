"""Redistribute samples from the ranks that generated them to the ranks that train on them.

An all-gather of sample infos gives every rank the numbers to make the same plan; an all-to-all sends each sample's
tokens once, as flat integer and float tensors, to the model replica that trains on it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from grpo_mp.types import Sample, SampleGroup, SampleInfo

HEADER = 5  # group id, index, prompt tokens, response tokens, truncated


def all_gather_sample_info(groups: Iterable[SampleGroup], process_group: dist.ProcessGroup) -> list[SampleInfo]:
    """All-gather the infos of all samples, in the order of (group id, index): the same on every rank."""
    rank = dist.get_rank(process_group)
    local_infos = [_sample_info(sample, group, rank) for group in groups for sample in group.samples]
    gathered: list[list[SampleInfo]] = [[] for _ in range(dist.get_world_size(process_group))]
    dist.all_gather_object(gathered, local_infos, group=process_group)
    return sorted((info for infos in gathered for info in infos), key=lambda info: info.key)


def gather_groups(
    groups: Iterable[SampleGroup], group_ids: Collection[int], process_group: dist.ProcessGroup
) -> list[SampleGroup]:
    """Gather the groups with these ids, with their texts, on rank 0, sorted by id; an empty list elsewhere.

    Every rank must call this.
    """
    local_groups = [group for group in groups if group.samples[0].group_id in group_ids]
    gathered: list[list[SampleGroup]] | None = None
    if dist.get_rank(process_group) == 0:
        gathered = [[]] * dist.get_world_size(process_group)
    dist.gather_object(local_groups, gathered, group=process_group, group_dst=0)
    return sorted((group for part in gathered or () for group in part), key=lambda group: group.samples[0].group_id)


def redistribute(
    groups: Iterable[SampleGroup],
    keys_by_rank: Mapping[int, Sequence[tuple[int, int]]],
    process_group: dist.ProcessGroup,
    replica: dist.ProcessGroup,
    replica_source: int,
) -> dict[tuple[int, int], Sample]:
    """Send each sample to the replica that trains on it. Every rank must call this.

    `keys_by_rank`: the source rank of every replica -> keys of its samples. Returns this replica's samples by key;
    text and reward parts stay with the holder.
    """
    local_samples = {(sample.group_id, sample.index): sample for group in groups for sample in group.samples}
    outgoing = [
        [local_samples[key] for key in keys_by_rank.get(rank, ()) if key in local_samples]
        for rank in range(dist.get_world_size(process_group))
    ]
    integers = _all_to_all([_encode_integers(samples) for samples in outgoing], torch.int64, process_group)
    floats = _all_to_all([_encode_floats(samples) for samples in outgoing], torch.float32, process_group)
    integers = _broadcast_to_replica(integers, replica, replica_source)
    floats = _broadcast_to_replica(floats, replica, replica_source)
    return {(sample.group_id, sample.index): sample for sample in _decode(integers, floats)}


def _sample_info(sample: Sample, group: SampleGroup, rank: int) -> SampleInfo:
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
        prompt=group.prompt.index,
        finished=group.finished,
        versions_sum=sum(sample.weight_versions),
        right=sample.right,
    )


def _all_to_all(outgoing: Sequence[torch.Tensor], dtype: torch.dtype, group: dist.ProcessGroup) -> torch.Tensor:
    sizes = torch.tensor([len(tensor) for tensor in outgoing])
    incoming_sizes = torch.empty_like(sizes)
    dist.all_to_all_single(incoming_sizes, sizes, group=group)
    incoming = torch.empty(int(incoming_sizes.sum()), dtype=dtype)
    dist.all_to_all_single(
        incoming, torch.cat(list(outgoing)).to(dtype), incoming_sizes.tolist(), sizes.tolist(), group=group
    )
    return incoming


def _broadcast_to_replica(values: torch.Tensor, replica: dist.ProcessGroup, source: int) -> torch.Tensor:
    if dist.get_world_size(replica) == 1:
        return values
    size = torch.tensor([len(values)])
    dist.broadcast(size, source, group=replica)
    if dist.get_rank() != source:
        values = torch.empty(int(size), dtype=values.dtype)
    dist.broadcast(values, source, group=replica)
    return values


def _encode_integers(samples: Sequence[Sample]) -> torch.Tensor:
    numbers: list[int] = []
    for sample in samples:
        numbers += [sample.group_id, sample.index, len(sample.prompt_tokens), len(sample.tokens), sample.truncated]
        numbers += [*sample.prompt_tokens, *sample.tokens, *sample.weight_versions]
    return torch.tensor(numbers, dtype=torch.int64)


def _encode_floats(samples: Sequence[Sample]) -> torch.Tensor:
    return torch.tensor([value for sample in samples for value in sample.rollout_logprobs], dtype=torch.float32)


def _decode(integers: torch.Tensor, floats: torch.Tensor) -> list[Sample]:
    numbers, logprobs = integers.tolist(), floats.tolist()
    samples, start, logprob_start = [], 0, 0
    while start < len(numbers):
        group_id, index, prompt_tokens, response_tokens, truncated = numbers[start : start + HEADER]
        end = start + HEADER + prompt_tokens + 2 * response_tokens
        tokens, start = numbers[start + HEADER : end], end
        samples.append(
            Sample(
                group_id=group_id,
                index=index,
                prompt_tokens=tuple(tokens[:prompt_tokens]),
                tokens=tuple(tokens[prompt_tokens : prompt_tokens + response_tokens]),
                rollout_logprobs=tuple(logprobs[logprob_start : logprob_start + response_tokens]),
                weight_versions=tuple(tokens[prompt_tokens + response_tokens :]),
                truncated=bool(truncated),
            )
        )
        logprob_start += response_tokens
    return samples
