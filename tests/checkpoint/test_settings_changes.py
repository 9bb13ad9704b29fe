"""A run is compared by what it computes; the log names what has changed."""

import json
import shutil
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_mp.checkpoint.run_state import ROLLOUTS, check_run_folder, claim_run_folder
from grpo_mp.data.template_date import INPUTS, set_template_date, strftime_now, template_date, use_template_date
from grpo_mp.utils.errors import UserError


class Run:
    """A run in `folder` that has done a step, and attempts to start it again with some settings otherwise."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.settings = {"run.folder": str(folder), "optimizer.lr": 1e-6} | settings
        folder.mkdir(parents=True)
        claim_run_folder(folder, self.text())
        (folder / "metrics.jsonl").write_text("{}\n")

    def text(self, **changes: Any) -> str:
        tree: dict[str, Any] = {}
        for name, value in (self.settings | changes).items():
            *sections, key = name.split(".")
            place = tree
            for section in sections:
                place = place.setdefault(section, {})
            place[key] = value
        return yaml.safe_dump(tree)

    def start(self, folder: Path | None = None, **changes: Any) -> list[str]:
        folder = folder or self.folder
        text = self.text(**changes)
        check_run_folder(folder, text, resume=True)
        return claim_run_folder(folder, text)


def test_a_run_folder_has_no_place(tmp_path: Path) -> None:
    run = Run(tmp_path / "one")
    moved = tmp_path / "disk" / "two"
    moved.parent.mkdir()
    shutil.move(run.folder, moved)
    assert run.start(moved, **{"run.folder": str(moved)}) == []
    link = tmp_path / "link"
    link.symlink_to(moved)
    assert run.start(link, **{"run.folder": str(link)}) == []


TEACHER = "algorithm.distillation.teacher"


@pytest.mark.parametrize(
    "name", ["model.path", "critic.path", "reward.model.path", f"{TEACHER}.path", f"{TEACHER}.math.path"]
)
def test_another_model_is_refused_but_not_a_link_to_the_same(name: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    run = Run(tmp_path / "run", **{name: str(tmp_path / "model")})
    (tmp_path / "link").symlink_to(tmp_path / "model")
    assert run.start(**{name: str(tmp_path / "link")}) == []
    with pytest.raises(UserError, match=rf"\({name} was '{tmp_path / 'link'}', is now '{tmp_path / 'other'}'\)"):
        run.start(**{name: str(tmp_path / "other")})


def test_paths_of_train_data_are_left_to_the_digest_of_their_rows(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", **{"data.train": "data/a.jsonl"})
    assert run.start(**{"data.train": "/mnt/data/a.jsonl"}) == []
    mixed = Run(tmp_path / "mixed", **{"data.train.a": {"path": "a.jsonl", "weight": 2.0, "pass_rates": "r.jsonl"}})
    assert mixed.start(**{"data.train.a": {"path": "/a.jsonl", "weight": 2.0, "pass_rates": "/r.jsonl"}}) == []
    with pytest.raises(UserError, match=r"data\.train\.a\.weight was 2\.0, is now 3\.0"):
        mixed.start(**{"data.train.a": {"path": "a.jsonl", "weight": 3.0, "pass_rates": "r.jsonl"}})


def test_the_log_names_what_a_run_resumes_with(tmp_path: Path) -> None:
    evals = {"data.eval.old": {"path": "a.jsonl", "samples": 1}}
    run = Run(tmp_path / "run", **evals, **{"monitor.loggers": {"wandb": {"api_key": "secret-1"}}})
    recorded = run.folder / ROLLOUTS / "x"
    recorded.mkdir(parents=True)
    sentences = run.start(
        **{
            "optimizer.lr": 5e-7,
            "data.eval.old": {"path": "b.jsonl", "samples": 4},
            "data.eval.new": {"path": "c.jsonl"},
            "reward.timeout_s": 5.0,
            "monitor.loggers": {"wandb": {"api_key": "secret-2"}},
        }
    )
    assert sorted(sentences) == [
        "resume: data.eval.new.path None -> c.jsonl",
        "resume: data.eval.old.path a.jsonl -> b.jsonl",
        "resume: data.eval.old.samples 1 -> 4",
        "resume: optimizer.lr 1e-06 -> 5e-07",
        "resume: reward.timeout_s 30 -> 5",
    ]
    assert recorded.exists()
    fresh = Run(tmp_path / "fresh")
    (fresh.folder / "metrics.jsonl").unlink()
    assert fresh.start(**{"optimizer.lr": 1.0}) == []  # it has done nothing that could be resumed


@pytest.mark.usefixtures("first_of_may")
def test_a_run_keeps_the_date_on_which_it_was_started_first(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    set_template_date(date(2024, 5, 2))
    run.start()
    assert strftime_now("%d %b %Y %H") == "02 May 2024 00"
    use_template_date(run.folder)
    assert strftime_now("%d %b %Y") == "01 May 2024"
    assert json.loads((run.folder / INPUTS).read_text()) == {"date": "2024-05-01"}
    set_template_date(date(2024, 5, 2))
    use_template_date(tmp_path / "none")
    assert template_date() == date(2024, 5, 2)
