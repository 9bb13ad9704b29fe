"""What flows through one step: prompts, samples, groups and packed micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # worker processes of tools import this module: it is light without torch
    import torch

PerToken: TypeAlias = "float | torch.Tensor"  # one number for all response tokens of a sample, or [response tokens]

ExpertIds = npt.NDArray[np.integer[Any]]  # uint8 where all experts of a layer fit, else int16

LEAST_LOGPROB = -128.0  # in place of anything smaller: exp() of it is 0 in float32, and 0 * infinity would be NaN
NO_TOKEN = -1  # in place of a token that the policy does not have

Message = dict[str, Any]  # of a chat: role, content, and what the template reads beside them

EpisodeState = Literal["completed", "truncated", "timeout", "error"]  # how an episode ended

TurnEnds = tuple[tuple[int, int], ...]  # (index of a turn's last token in the response, number of the turn), ascending

StepRewards = tuple[tuple[int, float], ...]  # (index of a step's last token in the response, its reward), ascending


def expert_id_bytes(num_experts: int) -> int:
    """Return the bytes of an expert's number in ExpertIds."""
    return 1 if num_experts <= 256 else 2


@dataclass(frozen=True)
class TopLogprobs:
    """The k tokens that a teacher finds most likely in each place of a response, and their logprobs."""

    ids: npt.NDArray[np.int32]  # [tokens, k]; NO_TOKEN: one that the policy does not have
    logprobs: npt.NDArray[np.float32]  # [tokens, k]

    @property
    def k(self) -> int:
        return self.ids.shape[1]

    def first(self, k: int) -> TopLogprobs:
        return TopLogprobs(self.ids[:, :k], self.logprobs[:, :k])


@dataclass(frozen=True)
class Prompt:
    """One prompt x, rendered by the chat template and tokenized."""

    index: int  # row in the prompt set, stable over the run
    text: str  # by which it is known: all messages as the user wrote them, before the chat template
    tokens: tuple[int, ...]
    answer: str | None = None
    columns: dict[str, Any] = field(default_factory=dict)  # the full data row, for reward functions
    messages: tuple[Message, ...] = ()  # as they were rendered
    epoch: int = 0  # in which it is drawn
    column: str | None = None  # of `columns`, that holds the prompt


@dataclass(frozen=True)
class Sample:
    """One response y to a prompt. Every token carries its rollout logprob and its weight version."""

    group_id: int  # unique in the run: which group the advantage is normalized in
    index: int  # position inside the group
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]  # the response, ending with the stop token unless truncated
    rollout_logprobs: tuple[float, ...]
    weight_versions: tuple[int, ...]
    truncated: bool
    text: str = ""
    reward: float = 0.0
    reward_terms: dict[str, float] = field(default_factory=dict)  # by reward name, unweighted
    is_scored: bool = True  # False: a term failed, or none applied; the reward, the mean of the others, counts nowhere
    step_rewards: StepRewards = ()  # (index of a step's last token in `tokens`, its reward)
    extra: dict[str, Any] = field(default_factory=dict)  # what reward functions gave to `log_extra`, by column
    verify_steps: int = 0  # steps of speculative decoding in which the response was generated; 0: without
    is_correct: bool | None = None  # whether the answer is right; None: no term of the reward says so
    # An episode has also tokens that it was given, such as results of tools: its `text` is its last turn's.
    generated: tuple[bool, ...] = ()  # by token of the response, False: given, not trained on; (): all were generated
    state: EpisodeState | None = None  # None: no episode, one answer
    episode_reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)  # of the episode, by name
    messages: tuple[Message, ...] = ()  # of the episode, after the prompt
    error: str = ""  # why the episode failed
    teacher_logprobs: tuple[float, ...] = ()  # of `tokens`, by algorithm.distillation.teacher; (): none was asked
    teacher_topk: TopLogprobs | None = field(default=None, compare=False, repr=False)  # with distillation.topk
    # Experts that the engine chose, [total tokens - 1, MoE layers, top-k]: the last token was not computed. None: the
    # run does not ask for them, or the engine did not return them.
    routed_experts: ExpertIds | None = field(default=None, compare=False, repr=False)
    # An episode that forked has several sequences, and is one sample: of its last one, which has those before.
    earlier: tuple[Sample, ...] = ()  # oldest first: tokens and step rewards; all else is said by the last
    part: int = 0  # of an earlier sequence, its number from 1 on; 0: it is the last, or the only one
    turn_ends: TurnEnds = ()  # of an episode that forked, whose turns are numbered through all its sequences

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError(f"sample {self.group_id}/{self.index} has no tokens")
        if not len(self.tokens) == len(self.rollout_logprobs) == len(self.weight_versions):
            raise ValueError(f"sample {self.group_id}/{self.index}: tokens, logprobs and versions differ in length")
        if self.generated and len(self.generated) != len(self.tokens):
            raise ValueError(f"sample {self.group_id}/{self.index}: tokens and their mask differ in length")
        if self.teacher_logprobs and len(self.teacher_logprobs) != len(self.tokens):
            raise ValueError(f"sample {self.group_id}/{self.index}: tokens and the teacher's logprobs differ in length")
        if self.teacher_topk and not len(self.tokens) == len(self.teacher_topk.ids) == len(self.teacher_topk.logprobs):
            raise ValueError(f"sample {self.group_id}/{self.index}: tokens and the teacher's top k differ in length")

    @classmethod
    def from_tokens(
        cls, number: int, prompt: Sequence[int], response: Sequence[int], generated: Sequence[bool] = ()
    ) -> Sample:
        zeros = (0,) * len(response)
        logprobs, mask = tuple(map(float, zeros)), tuple(generated)
        return cls(number, 0, tuple(prompt), tuple(response), logprobs, zeros, truncated=False, generated=mask)

    @property
    def key(self) -> tuple[int, ...]:
        return (self.group_id, self.index, self.part) if self.part else (self.group_id, self.index)

    @property
    def sequences(self) -> tuple[Sample, ...]:
        return (*self.earlier, self)

    @property
    def given_tokens(self) -> int:
        return len(self.generated) - sum(self.generated)

    @property
    def total_tokens(self) -> int:
        return len(self.prompt_tokens) + len(self.tokens)


@dataclass(frozen=True)
class SampleGroup:
    """The `group_size` samples of one prompt."""

    prompt: Prompt
    samples: tuple[Sample, ...]
    finished: bool = True  # False: aborted, its samples are not scored


@dataclass(frozen=True)
class SampleInfo:
    """The small numbers of one sample, known to every rank."""

    group_id: int
    index: int
    prompt_tokens: int
    response_tokens: int
    reward: float
    truncated: bool
    oldest_version: int  # of all its sequences
    reward_terms: dict[str, float] = field(default_factory=dict)
    step_rewards: StepRewards = ()
    prompt: int = 0  # index in the prompt set
    finished: bool = True  # False: its group was aborted
    versions_sum: int = 0  # over the response tokens of all its sequences
    is_correct: bool | None = None  # by the term that `reward.correct` names; None: that term says nothing about it
    has_routed_experts: bool = False
    verify_steps: int = 0  # as in Sample
    given_tokens: int = 0  # of the response, not generated: none trains on them
    has_own_prompt: bool = False  # another than its group's
    state: EpisodeState | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    earlier: tuple[SampleInfo, ...] = ()  # of an episode that forked, see Sample
    part: int = 0
    turn_ends: TurnEnds = ()  # as in Sample
    is_scored: bool = True  # as in Sample

    @property
    def generated_tokens(self) -> int:
        return self.response_tokens - self.given_tokens

    @property
    def key(self) -> tuple[int, ...]:
        return (self.group_id, self.index, self.part) if self.part else (self.group_id, self.index)

    @property
    def sequences(self) -> tuple[SampleInfo, ...]:
        return (*self.earlier, self)

    @property
    def all_response_tokens(self) -> int:
        return sum(sequence.response_tokens for sequence in self.sequences)

    @property
    def all_step_rewards(self) -> StepRewards:
        starts = accumulate((sequence.response_tokens for sequence in self.sequences), initial=0)
        pairs = zip(self.sequences, starts, strict=False)
        return tuple((start + end, reward) for sequence, start in pairs for end, reward in sequence.step_rewards)

    @property
    def generation_order(self) -> torch.Tensor | None:
        """Return the response tokens of all sequences by when they were generated, as indices int64 [tokens].

        What a turn was given goes with it. None: in the order in which they are.
        """
        import torch

        turns = [turn for sequence in self.sequences for _, turn in sequence.turn_ends]
        is_known = all(turns) and all(sequence.turn_ends for sequence in self.sequences)
        if not self.earlier or turns == sorted(turns) or not is_known:
            return None
        of_tokens = [
            torch.full((end - before,), turn)
            for sequence in self.sequences
            for (before, _), (end, turn) in pairwise(((-1, 0), *sequence.turn_ends))
        ]
        return torch.cat(of_tokens).argsort(stable=True)

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens


@dataclass(frozen=True)
class RowRange:
    """`count` rows of a micro-batch from `start` on."""

    start: int = 0
    count: int = 0


@dataclass(frozen=True)
class RoutedExperts:
    """Experts to replay in a rank's own MoE layers, for some rows of what its routers see; on the host.

    Routers see the rows of the rank's context slice, and with sequence parallelism its tensor rank's part of them.
    """

    ranges: torch.Tensor  # int32 [m, 2], ascending: the first of some rows that follow each other, how many they are
    experts: torch.Tensor  # uint8 or int16 [rows, layers, top-k]

    @property
    def rows(self) -> torch.Tensor:
        import torch

        starts, counts = self.ranges.long().unbind(1)
        return torch.arange(len(self.experts)) + (starts - counts.cumsum(0) + counts).repeat_interleave(counts)

    @property
    def nbytes(self) -> int:
        """Return the bytes on the host."""
        return self.ranges.nbytes + self.experts.nbytes


@dataclass
class MicroBatch:
    """Sequences packed end to end: what one forward of the policy sees. All tensors are [T] unless said.

    Position t predicts `targets[t]`; per-token values belong to that target. `mask` is 1 where the
    target is a generated token of a response. Padding (to a multiple the layout needs) is a sequence of its own.
    """

    tokens: torch.Tensor  # int64
    positions: torch.Tensor  # int64, position inside its sequence
    targets: torch.Tensor  # int64
    mask: torch.Tensor  # float32, 0 or 1
    lengths: tuple[int, ...]  # padded length of every packed sequence, shared prompts among them; sums to T
    sequence_index: torch.Tensor  # int64, which sequence of `sample_ids` a token belongs to; -1 is padding
    sample_ids: tuple[int, ...]  # index of each packed sequence into the update's sample list
    advantages: torch.Tensor  # float64
    loss_weights: torch.Tensor  # float64, share of the token in the update's loss
    rollout_logprobs: torch.Tensor  # float32
    old_logprobs: torch.Tensor | None = None  # float32; None: the logprobs of the first update are the old ones
    reference_logprobs: torch.Tensor | None = None  # float32
    teacher_logprobs: torch.Tensor | None = None  # float32; None: no teacher scored its samples
    # The teacher's most likely tokens, int32 [T, k], NO_TOKEN where there is none, and their logprobs, float32 [T, k].
    teacher_topk_ids: torch.Tensor | None = None
    teacher_topk_logprobs: torch.Tensor | None = None
    # In a loss: the policy's logprobs of these tokens, and of all others together, float32 [k + 1, T] with a gradient.
    topk_logprobs: torch.Tensor | None = None
    # Of a critic: value of the state before each target, float32; the return that it learns, float64.
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    routed_experts: RoutedExperts | None = None  # None: routers choose
    prompt_rows: tuple[RowRange, ...] = ()  # by sequence, the rows before its own; (): each holds its own prompt
    entropy_floor: float = -math.inf  # nats: tokens below it are masked out of the loss
    entropy_weight: float = 0.0  # 1 / tokens of the update that the entropy bonus is a mean over
    # Where the multi-token-prediction layer learns: the token after `targets`, int64; its share in the update's loss,
    # float64; its rollout logprob, float32.
    mtp_targets: torch.Tensor | None = None
    mtp_weights: torch.Tensor | None = None
    mtp_rollout_logprobs: torch.Tensor | None = None

    @property
    def in_loss(self) -> torch.Tensor:
        return self.mask.bool() & (self.loss_weights != 0)

    @property
    def total_tokens(self) -> int:
        return self.tokens.numel()

    def to(self, device: torch.device) -> MicroBatch:
        """Return the micro-batch with every tensor on `device`."""
        import torch

        if self.tokens.device == device:
            return self
        moved: dict[str, Any] = {
            name: copy_to(value, device) for name, value in vars(self).items() if isinstance(value, torch.Tensor)
        }
        return replace(self, **moved)


def copy_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the host tensor on `device`."""
    if device.type != "cuda":
        return tensor.to(device)
    # From ordinary host memory CUDA would first wait for all kernels that are queued.
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)
