"""Print the sbatch options of a replacement for a running job, one a line.

`scontrol show job ID | python -m grpo_mp.cli.slurm_resubmit BAD`: BAD lists the nodes to exclude, separated by commas.
The job's present options come first, then those given to `grpo-mp launch`, which override them.
"""

import os
import re
import sys
from collections.abc import Mapping

from grpo_mp.utils.parsers import Parser

OPTIONS_VARIABLE = "GRPO_MP_SBATCH_OPTIONS"  # environment variable: the options given to `grpo-mp launch`, one a line
FIELD = re.compile(r"(?:^|\s)([\w/:]+)=(.*?)(?=\s+[\w/:]+=|$)", re.MULTILINE)
NONE = {"", "0", "(null)", "N/A", "Partition_Limit"}
OPTIONS = {
    "JobName": "job-name",
    "Account": "account",
    "QOS": "qos",
    "Partition": "partition",
    "Reservation": "reservation",
    "TimeLimit": "time",
    "Features": "constraint",
    "Licenses": "licenses",
    "MinMemoryNode": "mem",
    "MinMemoryCPU": "mem-per-cpu",
}
GPUS = re.compile(r"gres[:/]gpu[:=](\S+)")
WHOLE_NODES = ("NO", "EXCLUSIVE")  # OverSubscribe of --exclusive


def main() -> None:
    """Run the command line."""
    parser = Parser("python -m grpo_mp.cli.slurm_resubmit", str(__doc__))
    parser.add_argument("bad")
    args = parser.parse_args()
    given = [option for option in os.environ.get(OPTIONS_VARIABLE, "").split("\n") if option]
    print("\n".join(sbatch_options(job_fields(sys.stdin.read()), given, args.bad)))


def job_fields(text: str) -> dict[str, str]:
    """Return the fields that are set of what `scontrol show job` says."""
    return {name: value for name, value in FIELD.findall(text) if value not in NONE}


def sbatch_options(fields: Mapping[str, str], given: list[str], bad: str) -> list[str]:
    """Return the options of a job like the one with these fields, and without the bad nodes; the last of a name counts.

    `given`: options that a user gave for sbatch. `bad`: names, separated by commas.
    """
    options = [f"--{option}={fields[field]}" for field, option in OPTIONS.items() if field in fields]
    for field, option in (("StdOut", "output"), ("StdErr", "error")):
        if field in fields and (option == "output" or fields[field] != fields.get("StdOut")):
            folder, slash, name = fields[field].rpartition("/")
            name = re.sub(rf"(?<!\d){fields['JobId']}(?!\d)", "%j", name)  # a file of its own, as this job has
            options.append(f"--{option}={folder}{slash}{name}")
    if gpus := GPUS.fullmatch(fields.get("TresPerNode", "")):
        options.append(f"--gpus-per-node={gpus[1]}")
    if fields.get("OverSubscribe") in WHOLE_NODES:
        options.append("--exclusive")
    if (cores := fields.get("CPUs/Task", "1")) != "1":
        options.append(f"--cpus-per-task={cores}")
    excluded = ",".join(filter(None, [bad, fields.get("ExcNodeList")]))
    return [*options, *given, f"--exclude={excluded}"]


if __name__ == "__main__":
    main()
