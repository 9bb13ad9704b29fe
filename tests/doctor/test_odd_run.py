"""What `grpo-mp doctor` says of files that others have cut or edited, and of what cannot be asked: one sentence."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from grpo_mp.monitor.live_engines import EngineServer, EngineWeights, ask_weights
from tests.cli.command import Result, run_command
from tests.doctor.test_run import SETTINGS, line


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "settings.yaml").write_text(json.dumps(SETTINGS))
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line(1, 0.0, **{"time/step_s": 2.0})) + "\n")
    return tmp_path


@pytest.mark.parametrize(
    "plan",
    ["[]", '{"phases": []}', '{"phases": {"train": null}}', '{"phases": {"train": {"seconds": "x"}}}', "{", "\0"],
)
def test_what_is_no_plan_is_not_compared_with(run: Path, plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "plan.json").write_text(plan)
    result = run_command(capsys, "doctor", "run", run)
    assert (result.status, result.err) == (0, "")
    assert f"warning: times are not compared with the plan, which cannot be read\n    {run}/plan.json: " in result.out
    assert "a step takes 2.00 s" in result.out


@pytest.mark.parametrize("plan", ["{}", '{"phases": {"train": {}}}'])
def test_a_plan_without_times_is_one(run: Path, plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "plan.json").write_text(plan)
    result = run_command(capsys, "doctor", "run", run)
    assert (result.status, "the plan" in result.out) == (0, False)


def refused(result: Result, sentence: str) -> None:
    assert (result.status, result.out) == (2, "")
    assert result.err.splitlines()[-1].startswith("error: ")
    assert sentence in result.err.splitlines()[-1]


@pytest.mark.parametrize("settings", ["", "- 1\n", "text"])
def test_what_are_no_settings_is_a_sentence(run: Path, settings: str, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "settings.yaml").write_text(settings)
    refused(run_command(capsys, "doctor", "run", run), "settings.yaml: no settings of a run: copy it again")


def test_metrics_that_are_a_folder(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    refused(run_command(capsys, "doctor", "run", run), "metrics.jsonl: Is a directory")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"\xff\xfe\x00\x01\n\x07\n", "metrics.jsonl: it is damaged, no line of it is that of a step"),
        (b"\xff\xfe\x00\x01", "metrics.jsonl: it is damaged, no line of it is that of a step"),
        (b'{"step": "x"}\n', "metrics.jsonl: it is damaged, no line of it is that of a step"),
        (b'{"step": 1, "rew', "no step is in metrics.jsonl yet: wait"),
        (b"", "no step is in metrics.jsonl yet: wait"),
    ],
)
def test_metrics_that_are_damaged_are_not_waited_for(
    run: Path, content: bytes, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "metrics.jsonl").write_bytes(content)
    refused(run_command(capsys, "doctor", "run", run), sentence)


class Engine(BaseHTTPRequestHandler):
    """Answers as an engine does; each time that it is asked, its weights are of another update or of the same."""

    versions: Iterator[str]

    def do_GET(self) -> None:
        self.answer({"weight_version": next(self.versions)} if self.path == "/model_info" else {"loads": []})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer({"ranks": [{"checksums": {"a": "1"}}]})

    def answer(self, reply: object) -> None:
        content = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Keep silent."""


@pytest.mark.parametrize(
    ("versions", "held"),
    [(["3", "3"], EngineWeights(0, "3", {"a": "1"})), (["3", "4"], EngineWeights(0, "4", changed=True))],
)
def test_an_engine_that_a_sync_reached_while_it_was_asked(versions: list[str], held: EngineWeights) -> None:
    handler = type("OneEngine", (Engine,), {"versions": iter(versions)})
    server = HTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert ask_weights(EngineServer(0, f"http://127.0.0.1:{server.server_port}", "key", "cpu")) == held
    finally:
        server.shutdown()
        server.server_close()
