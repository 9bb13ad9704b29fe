"""One rank that runs many cases: `torchrun ... -m tests.parallel.worker JOB.json`.

Nothing is imported above: saving a checkpoint spawns a process that imports this module again.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    from tests.parallel.run_cases import run_cases

    run_cases(Path(sys.argv[1]))
