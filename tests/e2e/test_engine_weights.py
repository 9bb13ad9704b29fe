"""What real engines hold after a sync of all weights, of what changed, and after they load the exported folder."""

import json
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch

from grpo_mp.config.sections import LayoutConfig
from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.rollout.engine_layout import engine_parallelism, expert_alignment
from grpo_mp.weight_sync.plan import engine_readers, group_params, plan_sync
from grpo_mp.weight_sync.wire import WireFormat
from tests.e2e.conftest import StartJob, outcome
from tests.e2e.sync_and_export import ALTERED
from tests.shard_holders import shard_holders
from tools.tiny.arithmetic import vocabulary_words
from tools.tiny.models import make_tiny, make_tokenizer

pytestmark = pytest.mark.slow

JOB = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "tests.e2e.sync_and_export")


def make_model_and_settings(run: Path, model: Path, gpus: int) -> tuple[str, ...]:
    """Write the model, and return the overrides of a run of it by two ranks with engines of so many."""
    # SGLang's CPU kernels pad an expert to 32 rows a rank: what is smaller is not cut.
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "moe_intermediate_size": 64}
    make_tiny(model, "deepseek_v3", make_tokenizer(vocabulary_words()), **sizes)
    return (f"run.folder={run}", f"model.path={model}", "layout={expert: 2}", f"engine.gpus_per_engine={gpus}")


def planned_bytes(hf: HfConfig, gpus: int, ranks_per_node: int = 2) -> tuple[list[int], int]:
    """Return what each of two ranks sends by the plan that needs no run, and the bytes of all weights, in float32.

    Each rank has half of the experts, and all other weights.
    """
    params = {name: param for name, param in family_of(hf).params(hf).items() if not param.alias}
    wire = WireFormat(params, dict.fromkeys(params, 1), torch.float32)
    layers = (range(hf.int("num_hidden_layers")),)
    parallelism = engine_parallelism(gpus, {}, hf)
    readers = engine_readers(range(0, 2, gpus), parallelism, expert_alignment(parallelism, {}, False, None))
    holders = shard_holders(params, LayoutConfig(expert=2), 2, layers)
    plan = plan_sync(group_params(params), holders, readers, ranks_per_node, wire.sizes, 2**30)
    sent = [0, 0]
    for transfer in chain(*plan.rounds):
        for source, shard in transfer.shards():
            sent[source] += wire.sizes.sent(shard) * (source != transfer.receiver)
    return sent, 4 * sum(param.num_elements for param in params.values())


def test_two_engines_of_the_quickstart_get_what_they_lack(tmp_path: Path) -> None:
    """A sync of its model once sent each engine all of it; a rank now sends the other engine half of the experts."""
    make_tiny(tmp_path, "deepseek_v3", make_tokenizer(vocabulary_words()))
    sent, model_bytes = planned_bytes(HfConfig.read(tmp_path), gpus=1)
    assert 4.0e6 < model_bytes < 4.3e6
    assert max(sent) < 0.6e6


@pytest.mark.parametrize("gpus", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_an_engine_has_what_it_would_load_from_the_exported_folder(
    start_job: StartJob, tmp_path: Path, gpus: int
) -> None:
    """Bit for bit and in every logprob, and also where only what changed was sent.

    What something else altered is found by the check of what is not sent, and is then right.

    Engines of one rank keep all experts, an engine of two ranks half of each on each. What each rank sends is what is
    planned, to the byte.
    """
    run = tmp_path / "run"
    model = tmp_path / "model"
    result = outcome(start_job(*make_model_and_settings(run, model, gpus), command=JOB))
    assert (result.status, result.left) == (0, []), result.err
    check_reports(run, gpus, planned_bytes(HfConfig.read(model), gpus))


def check_reports(run: Path, gpus: int, planned: tuple[list[int], int]) -> None:
    """Check what two ranks of tests.e2e.sync_and_export found; `planned`: of `planned_bytes`."""
    reports = [json.loads((run / f"engine_{rank}.json").read_text()) for rank in range(2)]
    planned_sent, model_bytes = planned
    for report, sent in zip(reports, planned_sent, strict=True):
        assert report["changed"]["sent"] == report["changed"]["messages"] == report["first"]["messages"] == sent
        assert 0 < sent < model_bytes / 4
    for engine in reports[::gpus]:
        first, changed, again, fresh = (engine[name] for name in ("first", "changed", "again", "fresh load"))
        assert changed["checksums"] != first["checksums"]
        assert changed["checksums"] == again["checksums"] == fresh["checksums"]
        assert changed["scores"] == again["scores"] == fresh["scores"] != first["scores"]
    altered = reports[0]["altered"]
    changed = reports[0]["changed"]
    different = [name for name, value in altered["checksums"].items() if value != changed["checksums"][name]]
    assert different == [f"{ALTERED} (rank {rank})" for rank in range(2)] if gpus > 1 else [ALTERED]
    assert altered["scores"] != changed["scores"]
