"""One rank with optimizers on the host and on the device: `torchrun -m tests.policy.host_adam_on_ranks MODEL OUT`

Each rank writes OUT/RANK.json.
"""

import json
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from grpo_mp.platform import prepare


def main() -> None:
    """Update both in turn; save the one and resume it."""
    prepare()
    from grpo_mp.config.sections import LayoutConfig
    from grpo_mp.distributed.process_groups import start_parallel, stop_parallel
    from grpo_mp.policy.checkpoint import load_policy
    from tests.policy.test_host_adam import answer_as_a_device, make_policy, state_of, unequal, update
    from tests.save_policy import save_policy

    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    parallel = start_parallel(LayoutConfig(expert=2), 0, 60.0)
    with pytest.MonkeyPatch.context() as patch:
        answer_as_a_device(patch)
        on_device, on_host, resumed = (
            make_policy(model, parallel, offload, expert=2) for offload in ("step", "host", "host")
        )
        for number in range(3):
            update(on_device, number)
            update(on_host, number)
        if parallel.rank == 0:
            (out / "checkpoint").mkdir()
        dist.barrier()
        save_policy(on_host, out / "checkpoint")
        load_policy(resumed, out / "checkpoint")
        for policy in (on_device, on_host, resumed):
            update(policy, 3)
    result = {
        "parts": len(on_host.optimizer.chained_optimizers),
        "unequal": [str(name) for name in unequal(state_of(on_device), state_of(on_host))],
        "unequal_after_resume": [str(name) for name in unequal(state_of(resumed), state_of(on_host))],
    }
    (out / f"{parallel.rank}.json").write_text(json.dumps(result))
    stop_parallel()


if __name__ == "__main__":
    main()
