"""The trainer, with one expert's weights corrupted on their first way into the engines. Run under torchrun."""

from collections.abc import Mapping

from torch import Tensor

from grpo_mp.rollout.shared_memory import NamedTensors
from grpo_mp.train import main
from grpo_mp.weight_sync.plan import RankRound
from grpo_mp.weight_sync.reshard import Resharder

CORRUPT = "model.layers.1.mlp.experts.3.down_proj.weight"
join = Resharder.join
seen: list[str] = []


def join_corrupt(resharder: Resharder, round_: RankRound, arrived: Mapping[int, Tensor]) -> NamedTensors:
    staged = join(resharder, round_, arrived)
    for index, (name, tensor) in enumerate(staged):
        if name == CORRUPT and not seen:
            seen.append(name)
            staged[index] = (name, tensor * 1.5)  # not in place: it may be the policy's own
    return staged


if __name__ == "__main__":
    Resharder.join = join_corrupt  # type: ignore[method-assign]
    main()
