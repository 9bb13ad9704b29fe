"""The trainer, with one expert's weights corrupted on their first way into the engines. Run under torchrun."""

from grpo_mp.rollout.packed_tensors import NamedTensors
from grpo_mp.train import main
from grpo_mp.weight_sync.plan import RankRound
from grpo_mp.weight_sync.reshard import Resharder

CORRUPT = "model.layers.1.mlp.experts.3.down_proj.weight"
stage = Resharder.stage
seen: list[str] = []


def stage_corrupt(resharder: Resharder, round_: RankRound) -> NamedTensors:
    staged = stage(resharder, round_)
    for index, (name, tensor) in enumerate(staged):
        if name == CORRUPT and not seen:
            seen.append(name)
            staged[index] = (name, tensor * 1.5)  # not in place: it may be the policy's own
    return staged


if __name__ == "__main__":
    Resharder.stage = stage_corrupt  # type: ignore[method-assign]
    main()
