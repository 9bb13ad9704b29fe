"""Checksums of the weights that an engine holds, by SGLang's own request."""

from grpo_mp.rollout.client import TARGET, TARGET_AND_DRAFT, EngineClient


async def checksums(client: EngineClient, with_draft: bool = False) -> dict[str, str]:
    """Return the checksums of all tensors on all ranks of the engine, by tensor name and rank.

    `with_draft`: include the drafting layer.
    """
    selector = TARGET_AND_DRAFT if with_draft else TARGET
    ranks = (await client._call("POST", "/weights_checker", {"action": "checksum", **selector}))["ranks"]
    return {
        f"{name}{f' (rank {number})' if len(ranks) > 1 else ''}": value
        for number, rank in enumerate(ranks)
        for name, value in rank["checksums"].items()
    }
