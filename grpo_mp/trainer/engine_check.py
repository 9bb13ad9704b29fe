"""After a sync: every engine's logprobs against the policy's, and which tensor is wrong where they differ."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from grpo_mp.errors import UserError
from grpo_mp.scheduler.phases import Phase
from grpo_mp.sync.check import TOLERANCE, WIDER_SETS, CheckReport, compare, fixed_sequences, pooled, trimmed_mean, worst
from grpo_mp.sync.diagnose import describe_difference
from grpo_mp.trainer.scores import policy_scores
from grpo_mp.trainer.session import Session

PROMPTS = 4


class EngineDisagreesError(UserError):
    """An engine's logprobs are not the policy's."""


def check_engines(session: Session) -> CheckReport:
    """The worst engine's distance from the policy. Every rank must call this.

    Raises EngineDisagreesError on every rank when the mean of an engine is beyond the tolerance on the fixed tokens,
    and is so again on those and many more, each set without its farthest token: tokens at a routing tie do not decide
    (see sync/check.py).
    """
    settings = session.settings
    tolerance = settings.sync.check_tolerance or TOLERANCE["fp8" if session.sync.fp8 else settings.model.dtype]
    engines = _distances(session, 0)
    if worst(engines).passes(tolerance):
        return worst(engines)
    more = [_distances(session, number) for number in range(1, WIDER_SETS)]
    sets_of_engines = list(zip(engines, *more, strict=True))
    for engine, sets in enumerate(sets_of_engines):
        found, mean = pooled(sets), trimmed_mean(sets)
        if not mean <= tolerance:  # so that what is no number does not pass
            raise EngineDisagreesError(
                f"after the weight sync engine {engine} (rank {session.rollout.hosts[engine]}) disagrees with the "
                f"policy: mean |logprob difference| {mean:.3g} over {found.tokens} tokens, the farthest of each "
                f"set left out, largest {found.largest:.3g}, allowed mean {tolerance:g} (sync.check_tolerance); "
                f"{_find_wrong_tensor(session)}"
            )
    return worst([pooled(sets) for sets in sets_of_engines])


def _distances(session: Session, number: int) -> list[CheckReport]:
    """Every engine's report on one set of sequences, known to every rank."""
    parallel, rollout = session.parallel, session.rollout
    sequences = _sequences(session, number)
    with session.scheduler.phase(Phase.SYNC, "policy logprobs"):
        expected = policy_scores(session.policy, sequences)
    everyone = torch.zeros(parallel.world_size, 2, dtype=torch.float64)
    with session.scheduler.phase(Phase.CHECK):
        if rollout.client:
            mine = compare(rollout.call(rollout.client.score(sequences)), expected)
            everyone[parallel.rank] = torch.tensor([mine.mean, mine.largest], dtype=torch.float64)
        dist.all_reduce(everyone, group=parallel.host)
    tokens = sum(map(len, expected))
    return [CheckReport(float(everyone[rank, 0]), float(everyone[rank, 1]), tokens) for rank in rollout.hosts]


def _sequences(session: Session, number: int) -> Sequence[tuple[int, ...]]:
    """Set 0 holds real prompts as well."""
    wanted = session.settings.rollout
    return fixed_sequences(
        session.policy.hf.int("vocab_size"),
        wanted.max_prompt_tokens + wanted.max_response_tokens,
        session.settings.run.seed + number,
        () if number else [prompt.tokens for prompt in session.inputs.train.prompts[:PROMPTS]],
    )


def _find_wrong_tensor(session: Session) -> str:
    """Push again and look which of an engine's tensors change. Every rank must call this; all get the answer."""
    parallel, rollout, version = session.parallel, session.rollout, session.state.weight_version

    def push() -> dict[str, str]:
        session.sync.push(version)
        return checksums()

    def checksums() -> dict[str, str]:
        return rollout.call(rollout.client.checksums()) if rollout.client else {}

    with session.scheduler.phase(Phase.SYNC, "looking for the wrong tensor"):
        before = checksums()
        again = push()
        if rollout.client:
            rollout.call(rollout.client.overwrite_weights())
        restored = push()
    mine = describe_difference(before, again, restored) if rollout.client else ""
    found: list[str] = [""] * parallel.world_size
    dist.all_gather_object(found, mine, group=parallel.host)
    return "; ".join(f"engine {engine}: {found[rank]}" for engine, rank in enumerate(rollout.hosts))
