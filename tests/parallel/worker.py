"""One rank that serves many cases: `torchrun ... -m tests.parallel.worker JOB.json`.

Nothing is imported above: saving a checkpoint spawns a process that imports this module again.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    from tests.parallel.serve import serve

    serve(Path(sys.argv[1]))
