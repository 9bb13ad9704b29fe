"""The jobs: one torchrun start per number of ranks serves every case that a selected test needs."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel.cases import CASES, LAYOUTS, MODELS, Case, trains_mtp
from tests.parallel.expected import Expected, expect
from tests.parallel.full_model import Tensors, file_tensors, full_tensors
from tests.sparse_attention import IS_COMPUTED, SPARSE, needs_megatron
from tools.tiny.models import add_mtp_layer, make_tiny, make_tokenizer

ROOT = Path(__file__).parents[2]
LIMIT_S = 1500.0  # of one job


class Model:
    """A tiny model, and what transformers computes with it."""

    def __init__(self, name: str, root: Path) -> None:
        family, shape = MODELS[name]
        self.folder = root / "models" / name
        self.config = make_tiny(self.folder, family, make_tokenizer(["apples"]), **shape)
        if trains_mtp(name):
            add_mtp_layer(self.folder)
        self.expected: Expected = expect(self.folder, self.config["vocab_size"])
        layer = f"layers.{self.config['num_hidden_layers']}"
        copies = (f"{layer}.embed_tokens.weight", f"{layer}.shared_head.head.weight")  # of what the model has
        self.tensors: Tensors = {n: t for n, t in file_tensors(self.folder).items() if not n.endswith(copies)}
        torch.save(self.expected.given, root / "given" / f"{name}.pt")


class Outcomes:
    """What the ranks left behind, by case. Tests of one case follow each other: a few cases are kept in memory."""

    def __init__(self, root: Path, models: dict[str, Model]) -> None:
        self.root = root
        self.models = models
        self.ranks = lru_cache(maxsize=4)(self._ranks)
        self.gradient = lru_cache(maxsize=len(MODELS) + 1)(self._gradient)
        self.weights = lru_cache(maxsize=3 * len(MODELS))(self._weights)

    def by_rank(self, case: Case, measure: str) -> list[dict[str, Any]]:
        """One measure by all ranks; the test fails where the case broke."""
        ranks = self.ranks(case)
        errors = [rank["error"] for rank in ranks if "error" in rank]
        if errors:
            pytest.fail("\n".join(errors), pytrace=False)
        if not all(measure in rank for rank in ranks):
            log = (self.root / f"job_{case.ranks}.log").read_text()
            pytest.fail(f"not every rank answered; the end of the job's log:\n{log[-3000:]}", pytrace=False)
        return [rank[measure] for rank in ranks]

    def _ranks(self, case: Case) -> list[dict[str, Any]]:
        """The results of all ranks; those of a rank that broke have `error`, those of one that died are missing."""
        files = [self.root / "results" / case.name / f"{rank}.pt" for rank in range(case.ranks)]
        return [torch.load(file, weights_only=False) if file.exists() else {} for file in files]

    def _gradient(self, case: Case, measure: str = "gradient") -> Tensors:
        """Whole gradient by name; ranks that hold the same part must agree."""
        ranks = self.by_rank(case, measure)
        folder = self.models[case.model].folder
        return full_tensors(folder, [rank["shards"] for rank in ranks], [rank["held"] for rank in ranks], 1e-6)

    def family_gradient(self, case: Case, algorithm: str, measure: str = "family") -> Tensors:
        """The same, by one algorithm of the family, or of one kind of chats."""
        ranks = [rank[algorithm] if algorithm else rank for rank in self.by_rank(case, measure)]
        folder = self.models[case.model].folder
        return full_tensors(folder, [rank["shards"] for rank in ranks], [rank["held"] for rank in ranks], 1e-6)

    def _weights(self, case: Case, measure: str, index: int) -> Tensors:
        """Whole weights by name: those of one of the measure's moments."""
        ranks = self.by_rank(case, measure)
        folder = self.models[case.model].folder
        return full_tensors(folder, [rank["weights"][index] for rank in ranks], [rank["held"] for rank in ranks])


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of slow cases: CI runs them only at the versions that GPUs get.

    Sparse attention is computed only there, and its tests always run.
    """
    for item in items:
        given = _selected([item])
        if any(map(_is_sparse, given)):
            item.add_marker(needs_megatron)
        elif any(CASES[name].slow for name in given):
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.sweep)


def _is_sparse(name: str) -> bool:
    return MODELS[CASES[name].model][0] in SPARSE


@pytest.fixture(scope="session")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Run every case that a selected test is about, and those that it is compared with."""
    cases = _with_needs(name for name in _selected(request.session.items) if IS_COMPUTED or not _is_sparse(name))
    root = tmp_path_factory.mktemp("parallel")
    (root / "given").mkdir()
    models = {name: Model(name, root) for name in dict.fromkeys(case.model for case in cases)}
    # Fewer ranks load what more ranks saved.
    for ranks in sorted({case.ranks for case in cases}, reverse=True):
        _run_job(root, ranks, [case for case in cases if case.ranks == ranks])
    return Outcomes(root, models)


def _selected(items: Iterable[pytest.Item]) -> list[Case]:
    callspecs = (item.callspec for item in items if hasattr(item, "callspec"))
    given = (value for callspec in callspecs for value in callspec.params.values())
    return list(dict.fromkeys(value.name for value in given if isinstance(value, Case)))


def _with_needs(names: Iterable[str]) -> list[Case]:
    cases = {need: CASES[need] for name in names for need in (name, *CASES[name].needs)}
    layouts = list(LAYOUTS)
    order = list(CASES)
    return sorted(
        cases.values(), key=lambda case: (bool(case.loads), layouts.index(case.layout), order.index(case.name))
    )


def _run_job(root: Path, ranks: int, cases: Iterable[Case]) -> None:
    job = root / f"job_{ranks}.json"
    job.write_text(json.dumps([case.name for case in cases]))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *torchrun, "-m", "tests.parallel.worker", str(job)]
    with job.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            log.write(f"\nnot done after {LIMIT_S:.0f} s\n")
        finally:
            _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
