"""CPU time of one decode step of an engine, process by process: `python -m tests.bench.decode_step`.

One engine gets half of the work of compare_trl.py (8 prompts x 8 responses of given lengths), as one rank's engine does
there. CPU time does not depend on what else runs on the machine; the wall time does.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import psutil

from grpo_mp.examples.tiny_models import make_tokenizer
from grpo_mp.rollout.client import EngineClient, SamplingParams
from grpo_mp.rollout.engine_args import EngineSpec
from grpo_mp.rollout.server import EngineProcess
from tests.bench import workload as w
from tests.bench.run_grpo_mp import ExactLengths
from tests.engines import started_engine

START_LIMIT_S, REQUEST_LIMIT_S = 300.0, 600.0
ENGINES = 2  # of the comparison: this is one of them
Usage = dict[str, tuple[float, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="qwen3_moe")
    parser.add_argument("--rounds", type=int, default=2, help="the first one to warm up")
    parser.add_argument("--hold", type=Path, help="file with the ids of the processes, for a profiler")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lengths = list(w.make_workload(folder, given.family, 0).values())[: w.PROMPTS // ENGINES]
        spec = EngineSpec(0, 0, folder / w.MODEL, "float32", w.PROMPT_TOKENS + w.LONGEST, cpu=True)
        with started_engine(spec, folder / "engine.log") as process:
            process.wait_ready(START_LIMIT_S)
            try:
                asyncio.run(measure(process, w.read_questions(folder), lengths, given.rounds, given.hold))
            except BaseException:
                print((folder / "engine.log").read_text()[-6000:])
                raise


async def measure(
    process: EngineProcess, questions: Sequence[str], lengths: Sequence[Sequence[int]], rounds: int, hold: Path | None
) -> None:
    """Print a line for each round."""
    encode = make_tokenizer([]).encode
    by_prompt = {
        tuple(encode(question)): list(response_lengths)
        for question, response_lengths in zip(questions, lengths, strict=False)
    }
    async with aclosing(EngineClient(0, process.url, process.headers, REQUEST_LIMIT_S)) as plain:
        client = ExactLengths(plain, by_prompt)
        if hold:
            hold.write_text("\n".join(f"{one.pid} {role(one)}" for one in processes(process)))
        for number in range(rounds):
            await client.flush_cache()
            before, begin = usage(process), time.monotonic()
            groups = await asyncio.gather(*(client.generate(prompt, SamplingParams(1)) for prompt in by_prompt))
            tokens = sum(len(sample.tokens) for group in groups for sample in group)
            wall, after = time.monotonic() - begin, usage(process)
            steps = max(map(max, lengths))
            spent = {one: sum(after[one]) - sum(before.get(one, (0, 0))) for one in after}
            parts = ", ".join(f"{one} {1e3 * seconds / steps:.2f}" for one, seconds in spent.items())
            kernel = sum(after[one][1] - before.get(one, (0, 0))[1] for one in after)
            print(
                f"round {number}: {wall:6.2f} s wall, {tokens} tokens, {steps} steps; CPU ms a step: {parts}, "
                f"in all {1e3 * sum(spent.values()) / steps:.2f} (of it kernel {1e3 * kernel / steps:.2f})",
                flush=True,
            )


def processes(process: EngineProcess) -> list[psutil.Process]:
    return psutil.Process(process._process.pid).children(recursive=True)


def usage(process: EngineProcess) -> Usage:
    """Seconds that each process of the engine has computed: user, kernel."""
    times_by_role = {role(one): one.cpu_times() for one in processes(process)}
    return {name: (times.user, times.system) for name, times in times_by_role.items()}


def role(one: psutil.Process) -> str:
    title = one.cmdline()[0] if one.cmdline() else one.name()
    return title.split("::")[-1] if "::" in title else "server"


if __name__ == "__main__":
    main()
