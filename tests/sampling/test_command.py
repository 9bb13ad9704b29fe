"""The command before any engine starts: what it makes of settings, and which folders it refuses."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyarrow import parquet
from safetensors.torch import load_file, save_file

from grpo_mp.checkpoint.run_state import METRICS, SETTINGS
from grpo_mp.evaluate import read_inputs
from grpo_mp.rewards.scorer import RewardStats
from grpo_mp.rollout.journal import GroupJournal
from grpo_mp.sample import IDENTITY, SamplingJob, check_folder, read_command, run
from grpo_mp.trainer.sampling.answers import GROUPS, SAMPLES, SUMMARY
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.files import read_json, write_json
from grpo_mp.utils.parsers import sample_parser
from grpo_mp.utils.types import SampleGroup
from tests.conftest import TRAIN_PROMPTS, TinyRun, make_tiny_run
from tests.sampling.groups import answer


def command(config: Path, *arguments: str) -> SamplingJob:
    return read_command(sample_parser().parse_intermixed_args([str(config), *arguments]))


def preflight(job: SamplingJob) -> Any:
    return read_inputs(job, 1, 1)


def with_prompts(digest: str = "0") -> Any:
    """Inputs with prompts of this digest."""
    return SimpleNamespace(train=SimpleNamespace(digest=digest))


def test_settings_of_a_training_run_are_those_of_a_sampling(tiny_run: TinyRun) -> None:
    job = command(tiny_run.config, "--samples", "2", "rollout.temperature=0.7", "training.router_replay=R3")
    settings = job.settings
    assert (settings.rollout.group_size, settings.rollout.temperature) == (2, 0.7)
    assert (settings.data.eval, settings.training.router_replay) == ({}, "none")
    assert job.folder == tiny_run.folder / "run" / "sample" / "model"
    assert len(job.prompts(preflight(job))) == TRAIN_PROMPTS
    assert command(tiny_run.config, "algorithm=ppo").settings.critic is None


REFUSED = [
    (["data.train=none.jsonl"], "none.jsonl: no such file: set data.train"),
    (["--checkpoint", "none"], "none: incomplete checkpoint, manifest.json is missing"),
    (["--samples", "2", "sample.filters={best: {k: 3}}"], "the best k=3 of 2 answers to a prompt are all"),
    (["sample.filters=[right]", "reward={boxed: 1.0}"], "no reward term defines correctness"),
]


@pytest.mark.parametrize(("arguments", "sentence"), REFUSED)
def test_mistakes_are_refused_before_an_engine_starts(tiny_run: TinyRun, arguments: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        preflight(command(tiny_run.config, *arguments))


@pytest.fixture(scope="module")
def own_run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """Its files may be changed."""
    return make_tiny_run(tmp_path_factory.mktemp("own"))


CHANGES = {
    "rollout.temperature=0.5": "rollout.temperature was 1.0, is now 0.5",
    "rollout.group_size=2": "rollout.group_size was 4, is now 2",
    "engine.args={quantization: fp8}": "engine.args.quantization was None, is now 'fp8'",
}
SAME = (
    *("engine.concurrent_groups=3", "sample.filters=[right]", "sample.max_prompts=5", "run.steps=9", "optimizer.lr=1"),
    *("engine.args={mem_fraction_static: 0.5}", "reward.timeout_s=99"),
)


def begin(job: SamplingJob) -> None:
    write_json(job.folder / IDENTITY, job.identity(with_prompts()))


@pytest.mark.parametrize("change", CHANGES)
def test_a_folder_of_other_settings_is_refused(own_run: TinyRun, tmp_path: Path, change: str) -> None:
    out = ("--out", str(tmp_path))
    begin(command(own_run.config, *out))
    sentence = rf"holds answers of another sampling \(.*{re.escape(CHANGES[change])}\): choose another"
    with pytest.raises(UserError, match=sentence):
        check_folder(command(own_run.config, *out, change), with_prompts())
    check_folder(command(own_run.config, *out, *SAME), with_prompts())


def test_a_folder_of_other_weights_prompts_or_code_is_refused(own_run: TinyRun, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(own_run.model, tmp_path / "model"))
    code = tmp_path / "my_rewards.py"
    code.write_text("a = 1")
    arguments = ("--out", str(tmp_path), "--model", str(copy), f"reward.functions={{'{code}:brief': 0.5}}")
    job = command(own_run.config, *arguments)
    begin(job)
    check_folder(job, with_prompts())
    with pytest.raises(UserError, match="the prompts was '0', is now '1'"):
        check_folder(job, with_prompts("1"))
    code.write_text("a = 2")
    with pytest.raises(UserError, match=f"{code} was"):
        check_folder(job, with_prompts())
    code.write_text("a = 1")
    file = copy / "model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match="the model's files was"):
        check_folder(job, with_prompts())


def test_a_folder_of_a_run_is_refused(tiny_run: TinyRun, tmp_path: Path) -> None:
    (tmp_path / METRICS).touch()
    with pytest.raises(UserError, match="holds a training run: choose another --out"):
        check_folder(command(tiny_run.config, "--out", str(tmp_path)), with_prompts())


def test_other_filters_need_no_engine(tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where all prompts are answered the files are written anew from what is recorded."""

    def sample(*filters: str) -> tuple[str, dict[str, Any], list[tuple[int, int]]]:
        named = f"sample.filters=[{', '.join(filters)}]"
        job = command(tiny_run.config, "--out", str(tmp_path), "sample.max_prompts=3", named)
        run(job, preflight(job))
        rows = parquet.read_table(tmp_path / SAMPLES).to_pylist()
        return capsys.readouterr().out, read_json(tmp_path / SUMMARY), [(r["prompt_index"], r["index"]) for r in rows]

    job = command(tiny_run.config, "sample.max_prompts=3")
    journal = GroupJournal(tmp_path / GROUPS, 0)
    for prompt in job.prompts(preflight(job)):
        samples = [answer(index, 1 + index, prompt, is_correct=index % 2 == 0) for index in range(4)]
        journal.append(0, prompt.index, SampleGroup(prompt, tuple(samples)), RewardStats(), kept=True)
    write_json(tmp_path / SUMMARY, {"answered_prompts": 3})
    said, summary, rows = sample("right")
    assert rows == [(prompt, index) for prompt in range(3) for index in (0, 2)]
    assert "12 answers to 3 prompts, 50.0% right; dropped: right 6; kept 6 to 3 prompts" in said
    assert summary["accuracy"] == 0.5
    said, summary, rows = sample("right", "{tokens: {max: 1}}")
    assert (rows, summary["dropped"]) == ([(0, 0), (1, 0), (2, 0)], {"right": 6, "tokens": 3})
    assert "max: 1" in (tmp_path / SETTINGS).read_text()
