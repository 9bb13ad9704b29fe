"""A job that syncs, changes a few weights, alters an engine, syncs again and exports.

It asks its engines what they have after each of these.
Run as grpo_mp.train; writes RUN/engine_N.json.
"""

import asyncio
import json
from typing import Any

import torch

from grpo_mp.config import Settings
from grpo_mp.evaluate import open_engines
from grpo_mp.rollout.client import TARGET, EngineClient
from grpo_mp.train import main
from grpo_mp.trainer.engines import Engines
from grpo_mp.trainer.preflight import RunInputs
from grpo_mp.trainer.save import export_policy
from grpo_mp.weight_sync.update import SyncReport
from tests.rollout.checksums import checksums
from tests.weight_sync.sent_messages import sent_messages

SEQUENCES = [[4, 5, 6, 7, 8, 9, 10], [11, 12, 13, 14]]
ALTERED = "model.norm.weight"
CHANGED = ("experts.linear_fc2.weight3", "input_layernorm.weight", "linear_q_down_proj.weight")


def run(settings: Settings, inputs: RunInputs) -> None:
    with open_engines(settings, inputs, tuple, lambda *_: "") as ctx:
        found: dict[str, Any] = {"first": sync(ctx, 1)}
        with torch.no_grad():
            for name, tensor in ctx.policy.tensors.items():
                if name.endswith(CHANGED):
                    tensor.mul_(1.25)
        found["changed"] = sync(ctx, 2)
        if ctx.job.rank == 0:
            ctx.rollout.call(overwrite(ctx.rollout.client, ALTERED))
        found["altered"] = ask(ctx)
        found["again"] = sync(ctx, 3)
        folder = settings.run.folder / "exported"
        export_policy(ctx.policy, folder, settings.model.path, settings.sync.bucket_bytes)
        if ctx.rollout.client:
            client = ctx.rollout.client
            found["fresh load"] = ctx.rollout.call(load_and_describe(client, str(folder)))
        (settings.run.folder / f"engine_{ctx.job.rank}.json").write_text(json.dumps(found))


def sync(ctx: Engines, version: int) -> dict[str, Any]:
    with sent_messages() as messages:
        report: SyncReport = ctx.recovery.weight_sync.update_weights(version)
    sizes = {"sent": report.sent, "staged": report.staged, "rounds": report.rounds, "messages": sum(messages)}
    return {**sizes, **ask(ctx)}


def ask(ctx: Engines) -> dict[str, Any]:
    client = ctx.rollout.client
    return ctx.rollout.call(describe(client)) if client else {}


async def overwrite(client: EngineClient, tensor: str) -> None:
    """Fill one of the engine's tensors with random values behind the back of the sync."""
    others = [name for name in await checksums(client) if not name.startswith(tensor)]
    others = [name.partition(" ")[0] for name in others]
    await client._post("/weights_checker", {"action": "reset_tensors", "skip_tensor_list": others, **TARGET})


async def describe(client: EngineClient) -> dict[str, Any]:
    found, scores = await asyncio.gather(checksums(client), client.score(SEQUENCES))
    return {"checksums": found, "scores": scores}


async def load_and_describe(client: EngineClient, folder: str) -> dict[str, Any]:
    """Load a Hugging Face folder by SGLang's own loader."""
    await client._post("/update_weights_from_disk", {"model_path": folder})
    return await describe(client)


if __name__ == "__main__":
    main(run=run)
