"""Small inputs of a run, made once per session: nothing outside the repository is needed."""

import gc
import os
import random
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml

from grpo_mp.data.template_date import set_template_date, template_date
from grpo_mp.platform import prepare
from grpo_mp.utils.errors import UserError
from tools.tiny.arithmetic import make_problems, vocabulary_words, write_jsonl
from tools.tiny.models import make_tiny, make_tokenizer

# A loaded machine is slow, not wrong. A test that passes here passes everywhere: it draws the same cases.
PATIENT = hypothesis.settings(
    deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], derandomize=True, database=None
)
hypothesis.settings.register_profile("same draws", PATIENT)
hypothesis.settings.register_profile("fresh draws", PATIENT, derandomize=False, print_blob=True)

ROOT = Path(__file__).parents[1]
TRAIN_PROMPTS = 60
EVAL_PROMPTS = 6
# What one test process runs, the longest first: folders, and in e2e the files whose tests share a run of a fixture.
SHARED_RUN = "finished_run"
LONGEST = ("parallel", SHARED_RUN, "launch", "bench", "e2e", "rollout", "policy", "doctor", "trainer")


@dataclass(frozen=True)
class TinyRun:
    """A settings file whose model and data exist. `folder` holds everything; no run folder is made in it."""

    folder: Path
    config: Path
    model: Path
    train: Path


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fresh-draws", action="store_true", help="property tests draw new cases; --hypothesis-seed=N: those of N"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module is imported: it may import Megatron, and its settings of hypothesis are of the profile."""
    gc.disable()  # it would take a seventh of the time of imports and collection
    prepare()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so begins what a shell starts in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    hypothesis.settings.load_profile("fresh draws" if config.getoption("--fresh-draws") else "same draws")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest, so that no test process waits for another's last files."""
    items.sort(key=lambda item: _place(item.nodeid))


def pytest_collection_finish() -> None:
    """From now on garbage is collected."""
    gc.enable()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name what failed at once: where the whole is broken off, its end says nothing."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid} ({report.when}): {report.longreprtext[-1500:]}", file=sys.stderr, flush=True)


@cache
def _scope(nodeid: str) -> str:
    """Return what must be run by one process: a file, for the fixtures of its tests, or files that share a fixture."""
    file = nodeid.split("::")[0]
    if "/parallel/" in file:
        return "parallel"
    return SHARED_RUN if "/e2e/" in file and SHARED_RUN in (ROOT / file).read_text() else file


def _place(nodeid: str) -> int:
    scope = _scope(nodeid)
    folder = nodeid.split("/")[1]
    name = scope if scope in LONGEST else folder
    return LONGEST.index(name) if name in LONGEST else len(LONGEST)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of one scope are run by one process."""
    from xdist.scheduler import LoadScopeScheduling

    class ByScope(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _scope(nodeid)

    return ByScope(config, log)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Whatever ran before, a test draws the same."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


@pytest.fixture(autouse=True)
def _restore_signals() -> Iterator[None]:
    """Put back the handlers of this process: what it starts would inherit that a signal is ignored."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def sandbox() -> None:
    """Skip the test where programs of a model cannot be shut in."""
    from grpo_mp.sandbox.sandboxes import Sandboxes

    try:
        Sandboxes("tests")
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture
def first_of_may() -> Iterator[None]:
    """Chat templates that write the present day write 1 May 2024."""
    today = template_date()
    set_template_date(date(2024, 5, 1))
    yield
    set_template_date(today)


@pytest.fixture
def one_rank_group() -> Iterator[dist.ProcessGroup]:
    """The gloo group of a job of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def parallel() -> Iterator[Any]:
    """The process groups of a job of one rank."""
    from tests.one_rank import one_rank_job  # imports Megatron

    with one_rank_job() as parallel:
        yield parallel


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return make_tiny_run(tmp_path_factory.mktemp("tiny"))


def make_tiny_run(folder: Path) -> TinyRun:
    """DeepSeek-V3's shape in two layers, random weights, arithmetic word problems."""
    shape = {"num_hidden_layers": 2, "hidden_size": 64, "moe_intermediate_size": 32}
    make_tiny(folder / "model", "deepseek_v3", make_tokenizer(vocabulary_words()), **shape)
    train, held_out = make_problems(TRAIN_PROMPTS, EVAL_PROMPTS, seed=0, largest=9)
    write_jsonl(train, folder / "train.jsonl")
    write_jsonl(held_out, folder / "eval.jsonl")
    (folder / "config.yaml").write_text(yaml.safe_dump(_settings(folder)))
    return TinyRun(folder, folder / "config.yaml", folder / "model", folder / "train.jsonl")


def _settings(folder: Path) -> dict[str, dict[str, object]]:
    return {
        "run": {"folder": str(folder / "run"), "steps": 3, "save_every": 0, "eval_every": 0},
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "layout": {"expert": 2},
        "data": {"train": str(folder / "train.jsonl"), "eval": {"arithmetic": str(folder / "eval.jsonl")}},
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_prompt_tokens": 64, "max_response_tokens": 16},
        "reward": {"answer": 1.0, "boxed": 0.5},
        "algorithm": {"kl": {"coef": 0.01}},
        "optimizer": {"lr": 1.0e-3, "lr_schedule": "linear"},
        "training": {"updates_per_step": 2},
        "monitor": {"report": False},
        "sync": {"check_tolerance": 1.0e-4},
    }
