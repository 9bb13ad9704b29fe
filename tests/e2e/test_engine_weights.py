"""What real engines hold after a sync of all weights, of what changed, and after they load the exported folder."""

import json
import sys
from pathlib import Path

import pytest

from grpo_mp.examples.arithmetic import vocabulary_words
from grpo_mp.examples.tiny_models import make_tiny, make_tokenizer
from grpo_mp.models.families import family_of
from grpo_mp.models.hf_config import HfConfig
from tests.e2e.conftest import StartJob, outcome

pytestmark = pytest.mark.slow

JOB = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "tests.e2e.sync_and_export")


@pytest.mark.parametrize("gpus", [1, 2])
def test_an_engine_has_what_it_would_load_from_the_exported_folder(
    start_job: StartJob, tmp_path: Path, gpus: int
) -> None:
    """Bit for bit and in every logprob, and also where only what changed was sent.

    Engines of one rank get each other's experts, an engine of two ranks gets half of each expert on each.
    """
    run, model = tmp_path / "run", tmp_path / "model"
    # SGLang's CPU kernels pad an expert to 32 rows a rank: what is smaller is not cut.
    make_tiny(
        model,
        "deepseek_v3",
        make_tokenizer(vocabulary_words()),
        num_hidden_layers=2,
        hidden_size=64,
        moe_intermediate_size=64,
    )
    settings = (f"run.folder={run}", f"model.path={model}", "layout={expert: 2}", f"engine.gpus_per_engine={gpus}")
    result = outcome(start_job(*settings, command=JOB))
    assert (result.status, result.left) == (0, []), result.err
    reports = [json.loads((run / f"engine_{rank}.json").read_text()) for rank in range(2)]
    hf = HfConfig.read(model)
    experts = sum(param.num_elements for param in family_of(hf).params(hf).values() if param.expert is not None)
    for report in reports:  # float32; each rank has half of the experts, and all other weights
        assert report["first"]["sent"] == pytest.approx(4 * experts / 4, rel=0.01)
    for engine in reports[::gpus]:
        first, unchanged, changed, complete, fresh = (
            engine[name] for name in ("first", "unchanged", "changed", "all", "fresh load")
        )
        assert (unchanged["staged"], unchanged["rounds"]) == (0, 0)
        assert unchanged["checksums"] == first["checksums"]
        assert 0 < changed["staged"] < complete["staged"] / 4
        assert changed["checksums"] != first["checksums"]
        assert changed["checksums"] == complete["checksums"] == fresh["checksums"]
        assert changed["scores"] == complete["scores"] == fresh["scores"] != first["scores"]
