"""The README of this package, with the metric table; `python -m grpo_mp.monitor.readme` writes it."""

from pathlib import Path

from grpo_mp.monitor.metrics import markdown

PAGE = Path(__file__).with_name("README.md")

HEAD = """# monitor

<!-- Written by `python -m grpo_mp.monitor.readme`; edit readme.py or metrics.yaml, not this file. -->

What a run leaves in its folder, and how to look at it:

| file | what | look at it with |
|---|---|---|
| `tensorboard/` | every metric below, histograms, sampled answers | `tensorboard --logdir RUN/tensorboard` |
| `metrics.jsonl` | the scalars, one JSON object per step; a value that is not finite is `null` | any JSON reader |
| `trace/rank_N.json`, `trace.json` | phases of each rank over time (pid: rank, tid: lane) | https://ui.perfetto.dev |
| `samples/step_N.jsonl` | sampled answers with reward, parts, truncation and weight version | a text editor |
| `eval/step_N.json` | scores of the eval sets after a step, with standard errors | any JSON reader |
| `pass_at_k.svg` | pass@k and maj@k before training and now, where `data.eval.NAME.samples` is above 1 | a browser |
| `logs/stuck_rank_N.txt` | stacks of all threads of a rank that passed a limit | a text editor |

A resumed run goes on in the same files: metrics and samples of steps after its checkpoint are dropped, the trace keeps
what happened. A phase that passes its limit ends its process with status 3 and one line that names rank, engine and
phase.

## Metrics

A name in braces stands for any: `eval/{set}/accuracy` is written once per eval set. Characters outside letters,
digits, `_`, `.` and `-` in such a name become `_`. A writer refuses names that are not listed here.

"""


def page() -> str:
    """Render the page as Markdown."""
    return HEAD + markdown()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
