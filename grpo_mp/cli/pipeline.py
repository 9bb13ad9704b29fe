"""Run the stages of a pipeline on this machine: grpo-mp pipeline FILE --ranks N

FILE defines `folder` and `stages`. Each stage is a run of grpo-mp train, sft or sample with a settings file and
overrides of its settings; '{NAME}/final' is the model of the stage NAME. `evaluation` defines how the model of each
stage is scored. All settings are checked before the first stage starts; --dry-run only checks. The same command
resumes a stopped pipeline. The exit status is 0 when all stages are done, 75 when the pipeline was stopped.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

from grpo_mp.utils.parsers import Parser, positive_int


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit status."""
    parser = Parser("grpo-mp pipeline", __doc__)
    parser.add_argument("file", type=Path, metavar="FILE", help="settings of the pipeline")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="laid over the file's, as folder=F"
    )
    parser.add_argument("--ranks", type=positive_int, help="ranks to start for each stage (default: one)")
    parser.add_argument("--dry-run", action="store_true", help="check all stages, show what would run, start nothing")
    args = parser.parse_intermixed_args(arguments)
    from grpo_mp.config import load_pipeline  # pydantic is slow to import
    from grpo_mp.pipeline.runner import Pipeline
    from grpo_mp.pipeline.scores import read_stage_scores, write_stage_scores
    from grpo_mp.pipeline.stages import make_jobs

    settings = load_pipeline(args.file, args.overrides)
    pipeline = Pipeline(settings, make_jobs(settings, args.file))
    if args.dry_run:
        for job in pipeline.jobs:
            print(f"{pipeline.state(job):6} {job.name}: grpo-mp {shlex.join(job.arguments(args.ranks))}")
        return 0
    status = pipeline.run(args.ranks)
    scores = read_stage_scores(pipeline.jobs)
    if scores:
        seconds = {name: record.seconds for name, record in pipeline.records.items()}
        write_stage_scores(settings.folder, scores, seconds)
    return status
