"""The stream of groups beside rounds: `python -m tests.bench.stream_beside_rounds [--steps 8] [--staleness 1]`.

Two real SGLang engines on two cores, a tiny mixture, groups of 8 responses of 16 to 512 tokens (every octave equally
likely), a filter that drops half of the groups. Rounds launch as many groups as are missing over the share kept so far,
wait for all, and again until the step has enough; what they do not need is lost. The stream is the trainer's collector.
Both take the same prompts through the same client; their steps alternate, so that both see the same machine, and
before each the engines' caches are emptied as by a weight sync. Reach: 1.5 times the samples/s, 98 % of tokens useful;
else the exit status is 1.
"""

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from grpo_mp.batching.exchange import sample_infos
from grpo_mp.batching.group_selection import AdmissionRule
from grpo_mp.checkpoint.run_state import TrainState
from grpo_mp.data.prompts import PromptSet
from grpo_mp.distributed.layout import ModelShape
from grpo_mp.rollout.client import EngineClient, EngineOutput, SamplingParams
from grpo_mp.rollout.engine_args import EngineSpec
from grpo_mp.rollout.server import EngineProcess
from grpo_mp.rollout.stream import GroupStream
from grpo_mp.rollout.worker import RolloutTask
from grpo_mp.trainer.collect import RolloutCollector
from grpo_mp.utils.types import Prompt, SampleGroup, SampleInfo
from tests.trainer.test_collect import OneRankRollout, collector
from tools.tiny.models import make_tiny, make_tokenizer

GROUP, SHORTEST, LONGEST, PROMPT_TOKENS, ENGINES = 8, 16, 512, 16, 2
MIN_KEPT_SHARE = 0.1
REACH, USEFUL = 1.5, 0.98
Left = dict[tuple[int, ...], list[int]]


def length_of(prompt: Sequence[int], index: int) -> int:
    return round(SHORTEST * (LONGEST / SHORTEST) ** Random(f"{prompt}/{index}").random())


def filter_half(samples: Sequence[SampleInfo]) -> bool:
    return Random(f"{samples[0].prompt} is kept").random() < 0.5


class ExactLengths(EngineClient):
    """Draws each response with its own length; what is broken off goes on to that length, on any engine."""

    def __init__(self, client: EngineClient, left: Left) -> None:
        self.__dict__.update(vars(client))  # the same connections
        self._left, self.generated = left, 0

    async def generate(
        self,
        prompt_tokens: Sequence[int],
        sampling: SamplingParams,
        count: int = 1,
        routing: ModelShape | None = None,
        routed_tokens: int = 0,
    ) -> list[EngineOutput]:
        prompt = tuple(prompt_tokens)
        waiting = self._left.get(prompt)
        lengths = [waiting.pop()] if waiting else [length_of(prompt, index) for index in range(count)]
        exact = [replace(sampling, max_response_tokens=length, ignore_eos=True).as_json(1) for length in lengths]
        body = {"input_ids": [list(prompt)] * count, "sampling_params": exact, "return_logprob": True}
        outputs = [
            self._parse_output(output, len(prompt), None) for output in await self._call("POST", "/generate", body)
        ]
        for length, output in zip(lengths, outputs, strict=True):
            self.generated += len(output.tokens)
            if output.aborted:
                kept = output.without_last_step(1).tokens  # as the worker goes on with it
                self._left[*prompt, *kept].append(length - len(kept))
        return outputs


@dataclass
class Side:
    """One scheme's sums."""

    seconds: float = 0.0
    samples: int = 0
    useful: int = 0  # tokens of samples that were trained on or that the filter dropped
    generated: int = 0

    def show(self, name: str) -> None:
        speed, share = self.samples / self.seconds, self.useful / self.generated
        print(f"{name:7} {self.samples:5} samples in {self.seconds:6.1f} s: {speed:6.2f} samples/s", end=", ")
        print(f"{share:.1%} of {self.generated:,} tokens useful")


@dataclass
class Rounds:
    """Launch a batch, wait for all of it, replace what the filter dropped, in rounds."""

    rollout: OneRankRollout
    prompts: PromptSet
    needed: int
    next: int = 0
    rounds: list[int] = field(default_factory=list)  # of each step

    def collect(self, step: int, store: dist.Store) -> tuple[int, int]:
        """Return samples and useful tokens of a step."""
        kept, dropped, rounds = list[SampleGroup](), list[SampleGroup](), 0
        while (missing := self.needed - len(kept)) > 0:
            launched = len(kept) + len(dropped)
            share = len(kept) / launched if launched else 1.0
            count, first = ceil(missing / max(share, MIN_KEPT_SHARE)), self.next
            self.next, rounds = first + count, rounds + 1
            sampling = SamplingParams(LONGEST)
            batch = self.prompts.prompts[first : first + count]
            task = RolloutTask(batch.__getitem__, GROUP, first, step, sampling)
            stream = GroupStream(store, f"rounds/{step}/{rounds}", AdmissionRule(count, count, count), ENGINES)
            for group in self.rollout.begin(task, stream).result().values():
                assert isinstance(group, SampleGroup)
                (kept if filter_half(sample_infos(group)) else dropped).append(group)
        self.rounds.append(rounds)
        trained = sorted(kept, key=lambda group: group.prompt.index)[: self.needed]
        useful = sum(len(sample.tokens) for group in (*trained, *dropped) for sample in group.samples)
        return self.needed * GROUP, useful


def compare(clients: list[ExactLengths], steps: int, needed: int, slots: int, staleness: int) -> None:
    """Alternate the steps of both sides; print their sums and the ratio."""
    random = Random(0)
    prompts = PromptSet(
        "bench",
        tuple(
            Prompt(i, str(i), tuple(random.randrange(10, 100) for _ in range(PROMPT_TOKENS)))
            for i in range(8 * steps * needed)
        ),
        0,
    )
    engines: Any = clients
    group: Any = SimpleNamespace(group=dist.group.WORLD)
    rule = {"zero_std": "refill"}
    sizes: dict[str, Any] = {"prompts_per_step": needed, "group_size": GROUP, "max_response_tokens": LONGEST}
    folder = Path(tempfile.mkdtemp(prefix="stream_beside_rounds_"))  # groups are recorded, as in a run
    stub = collector(group, engines, slots, rule, steps=steps, folder=folder, max_staleness=staleness, **sizes)
    stream: RolloutCollector = replace(stub, prompts=prompts, group_filter=filter_half)
    rollout: Any = stream.rollout
    rounds, state = Rounds(rollout, prompts, needed), TrainState()
    sides = {"rounds": Side(), "stream": Side()}
    for step in range(1, steps + 1):
        for name, side in sides.items():
            for client in clients:
                rollout.loop.run(client.flush_cache_when_idle())
            before, begun = sum(client.generated for client in clients), time.monotonic()
            if name == "rounds":
                samples, useful = rounds.collect(step, stream.job.store)
            else:
                batch = stream.collect(state, step)
                state, samples = replace(batch.state, step=step), len(batch.infos)
                assert not batch.dropped["surplus"] + batch.dropped["unfinished"]
                useful = sum(info.response_tokens for info in batch.scored)
            side.seconds += time.monotonic() - begun
            side.samples += samples
            side.useful += useful
            side.generated += sum(client.generated for client in clients) - before
        print(f"step {step}: " + ", ".join(f"{name} {side.seconds:.1f} s" for name, side in sides.items()), flush=True)
    for name, side in sides.items():
        side.show(name)
    print(f"rounds of a step: {rounds.rounds}")
    faster = sides["rounds"].seconds / sides["stream"].seconds
    print(f"stream / rounds: {faster:.2f} times the samples/s")
    if faster < REACH or sides["stream"].useful < USEFUL * sides["stream"].generated:
        sys.exit(f"the stream does not reach {REACH:g} times the samples/s and {USEFUL:.0%} useful tokens")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=8, help="groups of a step")
    parser.add_argument("--slots", type=int, default=8, help="groups that an engine has in flight")
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--family", default="qwen3_moe")
    given = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny(folder / "model", given.family, make_tokenizer([]))
        spec = EngineSpec(0, 0, folder / "model", "float32", PROMPT_TOKENS + LONGEST, cpu=True)
        processes = [EngineProcess(replace(spec, index=i, seed=i), folder / f"{i}.log") for i in range(ENGINES)]
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.wait_ready(600.0)
            left: Left = defaultdict(list)
            clients = [ExactLengths(EngineClient(p.spec.index, p.url, p.headers, 600.0), left) for p in processes]
            compare(clients, given.steps, given.prompts, given.slots, given.staleness)
        finally:
            for process in processes:
                process.stop()


if __name__ == "__main__":
    main()
