"""One rank that runs many cases: `torchrun ... -m tests.parallel.worker JOB.json`.

Nothing is imported above: saving a checkpoint spawns a process that imports this module again.
"""

if __name__ == "__main__":
    import gc
    import sys
    from pathlib import Path

    gc.disable()  # it would take a fifth of the time of the imports
    from tests.parallel.run_cases import run_cases

    gc.enable()
    run_cases(Path(sys.argv[1]))
