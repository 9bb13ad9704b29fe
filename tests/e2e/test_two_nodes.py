"""Plain torchrun over two nodes, both of them this machine."""

import sys
from pathlib import Path

import pytest

from grpo_mp.distributed.ports import claim_ports
from grpo_mp.models.hf_config import HfConfig
from tests.e2e.conftest import StartJob, outcome
from tests.e2e.jobs import read_jsonl, spans
from tests.e2e.test_engine_weights import check_reports, make_model_and_settings, planned_bytes

pytestmark = pytest.mark.slow
LOST = "engine_0_lost_1.log"


def node(number: int, port: int, module: str = "grpo_mp.train") -> tuple[str, ...]:
    meeting = ("--master-addr", "127.0.0.1", "--master-port", str(port))
    place = ("--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1")
    return (sys.executable, "-m", "torch.distributed.run", *place, *meeting, "-m", module)


@pytest.mark.nightly
@pytest.mark.parametrize("engines", [2, 1])
def test_each_node_has_its_engine_or_its_part_of_one_and_both_train(
    engines: int, start_job: StartJob, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    claim = claim_ports()
    settings = (f"run.folder={run}", "run.steps=1", f"engine.gpus_per_engine={2 // engines}")
    jobs = [start_job(*settings, command=node(number, claim.port)) for number in range(2)]
    if engines == 1:
        jobs[0].wait_until(lambda: spans(run, 0, "LOGPROB"))
        jobs[1].kill_engine(0)  # its part on the second node: all of it starts again
    ends = [outcome(job) for job in jobs]
    assert [end.status for end in ends] == [0, 0], [end.err for end in ends]
    assert [end.left for end in ends] == [[], []]
    assert [line["step"] for line in read_jsonl(run / "metrics.jsonl")] == [0, 1]
    logs = {"engine_0.log", "engine_1.log"} if engines == 2 else {"engine_0.log", "engine_0_node_1.log"}
    assert {log.name for log in (run / "logs").glob("engine_*")} == logs | ({LOST} if engines == 1 else set())
    assert ("it is started again" in jobs[0].err) == (engines == 1)
    claim.release()


@pytest.mark.nightly
def test_an_engine_over_two_nodes_has_what_it_would_load_from_the_exported_folder(
    start_job: StartJob, tmp_path: Path
) -> None:
    """As engines of one node: test_engine_weights.py."""
    run = tmp_path / "run"
    model = tmp_path / "model"
    claim = claim_ports()
    settings = make_model_and_settings(run, model, 2)
    jobs = [start_job(*settings, command=node(n, claim.port, "tests.e2e.sync_and_export")) for n in range(2)]
    ends = [outcome(job) for job in jobs]
    assert [end.status for end in ends] == [0, 0], [end.err for end in ends]
    check_reports(run, 2, planned_bytes(HfConfig.read(model), 2, ranks_per_node=1))
    claim.release()
