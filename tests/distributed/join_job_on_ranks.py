"""One rank of a job, half of whose ranks do not train: `torchrun -m tests.distributed.join_job_on_ranks OUT`"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from grpo_mp.platform import prepare


def main() -> None:
    """Use every kind of call on the groups; each rank writes what it found to OUT/RANK.json."""
    prepare()
    from grpo_mp.config.sections import LayoutConfig
    from grpo_mp.distributed.peers import watching_peers
    from grpo_mp.distributed.process_groups import all_gather, join_job, make_groups, make_parallel, stop_parallel

    job = join_job(60.0, engine_ranks=2)
    group = job.group
    rank = job.rank
    size = job.world_size
    found = {"rank": dist.get_rank(group), "size": dist.get_world_size(group), "ranks": all_gather(rank, group)}
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=group)
    received = torch.zeros(1)
    operations = [
        dist.P2POp(dist.isend, torch.tensor([float(rank)]), None, job.device_group, group_peer=(rank + 1) % size),
        dist.P2POp(dist.irecv, received, None, job.device_group, group_peer=(rank - 1) % size),
    ]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    last = [rank]
    dist.broadcast_object_list(last, group=group, group_src=size - 1)
    with watching_peers(group) as check_peers:
        check_peers()
    found |= {"sum": float(total), "from": float(received), "last": last[0]}
    if job.trains:
        parallel = make_parallel(job, LayoutConfig(tensor=2), 0)
        found |= {"trainers": all_gather(rank, parallel.cpu_group), "tensor": parallel.coords.tensor}
    else:
        first = rank - dist.get_rank()
        pair = make_groups([[other - first for other in (2, 3)]], 60.0)
        found |= {"engines": all_gather(rank, pair)}
    (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(found))
    stop_parallel()


if __name__ == "__main__":
    main()
