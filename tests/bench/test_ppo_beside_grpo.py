"""The bench of PPO compares runs that differ in the algorithm alone."""

from pathlib import Path

import pytest

from grpo_mp.config import load_settings
from tests.bench.ppo_beside_grpo import PRESETS, overrides, show
from tests.bench.quickstart_run import CONFIG


def test_presets_differ_in_the_algorithm_and_the_critic_alone() -> None:
    of_preset = {name: load_settings(Path(CONFIG), overrides(name, 40, 10)) for name in PRESETS}
    assert {name for name, settings in of_preset.items() if settings.critic} == {"ppo"}
    assert {settings.algorithm.kl.coef for settings in of_preset.values()} == {0.02}
    rest = [settings.model_dump(exclude={"algorithm", "critic"}) for settings in of_preset.values()]
    assert all(each == rest[0] for each in rest)


def test_the_table_has_a_row_for_each_preset(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = {"time/generate_s": 1.0, "time/logprob_s": 0.5, "time/train_s": 2.0}
    curves = ({"0": 0.1, "256": 0.2}, {"0": 0.1, "256": 0.3})
    cells = [
        {"cell": f"{preset}/{seed}", "accuracy": curve, "seconds": seconds, "host_bytes": size}
        for preset, size in (("grpo", 2**30), ("ppo", 2**30 + 2**24))
        for seed, curve in enumerate(curves)
    ]
    show(cells, 2**23)
    out = capsys.readouterr().out
    assert "25.0% (20.0% to 30.0%)" in out
    assert "ppo holds 16.0 MiB more than grpo; planned for a critic: 8.0" in out
