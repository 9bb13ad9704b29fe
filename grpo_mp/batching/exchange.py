"""Redistributes samples from the ranks that generated them to the ranks that train on them.

An all-gather of sample infos lets every rank compute the same plan. An all-to-all then sends each sample's tokens once,
to the model replica that trains on it.

"""

import pickle
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from grpo_mp.distributed.process_groups import all_gather
from grpo_mp.utils.types import Sample, SampleGroup, SampleInfo

Item = TypeVar("Item")


def all_gather_sample_info(groups: Iterable[SampleGroup], process_group: dist.ProcessGroup) -> list[SampleInfo]:
    """All-gather the infos of all samples, sorted by (group id, index): an equal list on every rank."""
    local_infos = [info for group in groups for info in sample_infos(group)]
    by_rank = all_gather(local_infos, process_group)
    return sorted((info for infos in by_rank for info in infos), key=lambda info: info.key)


def gather_groups(
    groups: Iterable[SampleGroup], group_ids: Collection[int], process_group: dist.ProcessGroup
) -> list[SampleGroup]:
    """Gather the groups with the given ids, texts included, on rank 0, sorted by id; other ranks return []."""
    local_groups = [group for group in groups if group.samples[0].group_id in group_ids]
    gathered: list[list[SampleGroup]] | None = None
    if dist.get_rank(process_group) == 0:
        gathered = [[]] * dist.get_world_size(process_group)
    dist.gather_object(local_groups, gathered, group=process_group, group_dst=0)
    return sorted((group for part in gathered or () for group in part), key=lambda group: group.samples[0].group_id)


def send_groups(
    groups: Iterable[SampleGroup], rank_of: Callable[[SampleGroup], int], process_group: dist.ProcessGroup
) -> list[SampleGroup]:
    """Send each group, texts included, to rank `rank_of(group)`; return the received groups sorted by id."""
    outgoing: list[list[SampleGroup]] = [[] for _ in range(dist.get_world_size(process_group))]
    for group in groups:
        outgoing[rank_of(group)].append(group)
    return sorted(all_to_all(outgoing, process_group), key=lambda group: group.samples[0].group_id)


def redistribute(
    groups: Iterable[SampleGroup],
    keys_by_rank: Mapping[int, Sequence[tuple[int, ...]]],
    process_group: dist.ProcessGroup,
    replica: dist.ProcessGroup,
    replica_source: int,
) -> dict[tuple[int, ...], Sample]:
    """Send each sequence to the replica that trains on it; return this replica's sequences by key.

    `keys_by_rank`: source rank of every replica -> keys of its sequences. Texts and reward terms are not sent.
    """
    local_samples = {part.key: part for group in groups for sample in group.samples for part in sample.sequences}
    outgoing = [
        [_without_text(local_samples[key]) for key in keys_by_rank.get(rank, ()) if key in local_samples]
        for rank in range(dist.get_world_size(process_group))
    ]
    received = [all_to_all(outgoing, process_group)]
    if dist.get_world_size(replica) > 1:
        dist.broadcast_object_list(received, replica_source, group=replica)
    return {sample.key: sample for sample in received[0]}


def _without_text(sample: Sample) -> Sample:
    """Return a copy with only the fields that training needs."""
    unused: dict[str, Any] = {"text": "", "messages": (), "error": "", "extra": {}, "metrics": {}, "step_rewards": ()}
    return replace(sample, **unused, reward=0.0, reward_terms={}, routed_experts=None, earlier=())


def all_to_all(outgoing: Sequence[list[Item]], group: dist.ProcessGroup) -> list[Item]:
    """Send `outgoing[r]`, pickled, to rank r; return the items received from all ranks."""
    parts = all_to_all_bytes([pickle.dumps(items) for items in outgoing], group)
    return [item for part in parts for item in pickle.loads(part.numpy().data)]


def all_to_all_bytes(outgoing: Sequence[bytes], group: dist.ProcessGroup) -> tuple[torch.Tensor, ...]:
    """Send `outgoing[r]` to rank r; return the bytes received from each rank, as uint8 tensors."""
    sizes = torch.tensor([len(content) for content in outgoing])
    incoming_sizes = torch.empty_like(sizes)
    dist.all_to_all_single(incoming_sizes, sizes, group=group)
    incoming = torch.empty(int(incoming_sizes.sum()), dtype=torch.uint8)
    content = torch.frombuffer(bytearray(b"".join(outgoing)), dtype=torch.uint8) if any(outgoing) else incoming[:0]
    dist.all_to_all_single(incoming, content, incoming_sizes.tolist(), sizes.tolist(), group=group)
    return incoming.split(incoming_sizes.tolist())


def sample_infos(group: SampleGroup) -> list[SampleInfo]:
    """Return the infos of a group's samples."""
    return [_sample_info(sample, group) for sample in group.samples]


def _sample_info(sample: Sample, group: SampleGroup) -> SampleInfo:
    return SampleInfo(
        group_id=sample.group_id,
        index=sample.index,
        prompt_tokens=len(sample.prompt_tokens),
        response_tokens=len(sample.tokens),
        reward=sample.reward,
        truncated=sample.truncated,
        oldest_version=min(min(part.weight_versions) for part in sample.sequences),
        reward_terms=sample.reward_terms,
        step_rewards=sample.step_rewards,
        prompt=group.prompt.index,
        finished=group.finished,
        versions_sum=sum(sum(part.weight_versions) for part in sample.sequences),
        is_correct=sample.is_correct,
        has_routed_experts=sample.routed_experts is not None,
        given_tokens=sample.given_tokens,
        has_own_prompt=sample.prompt_tokens != group.prompt.tokens,
        teacher_prompt_tokens=len(sample.teacher_prompt),
        state=sample.state,
        metrics=sample.metrics,
        verify_steps=sample.verify_steps,
        earlier=tuple(_sample_info(part, group) for part in sample.earlier),
        role=sample.role,
        part=sample.part,
        is_scored=sample.is_scored,
    )
