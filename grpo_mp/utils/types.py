"""Data types of a step: prompts, samples, groups and packed micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # worker processes of tools import this module, and torch would slow their start
    import torch

PerToken: TypeAlias = "float | torch.Tensor"  # value shared by all response tokens of a sample, or [response tokens]

# uint8 for layers of up to 256 experts, else int16. With keys of sparse attention, records `experts` and `keys`.
ExpertIds = npt.NDArray[Any]

LEAST_LOGPROB = -128.0  # lower bound of logprobs: its exp() is 0 in float32, and 0 * -infinity would be NaN
NO_TOKEN = -1  # replaces a teacher's token that is not in the policy's vocabulary

Message = dict[str, Any]  # chat message: role, content, and other keys that the chat template reads

EpisodeState = Literal["completed", "truncated", "timeout", "error"]  # how an episode ended

StepRewards = tuple[tuple[int, float], ...]  # (index of a step's last token in the response, its reward), ascending


def expert_id_bytes(num_experts: int) -> int:
    """Return the size in bytes of one element of ExpertIds."""
    return 1 if num_experts <= 256 else 2


@dataclass(frozen=True)
class TopLogprobs:
    """The k most likely tokens of a teacher at each position of a response, and their logprobs."""

    ids: npt.NDArray[np.int32]  # [tokens, k]; NO_TOKEN: not in the policy's vocabulary
    logprobs: npt.NDArray[np.float32]  # [tokens, k]

    @property
    def k(self) -> int:
        return self.ids.shape[1]

    def first(self, k: int) -> TopLogprobs:
        return TopLogprobs(self.ids[:, :k], self.logprobs[:, :k])


@dataclass(frozen=True)
class KeptTokens:
    """Tokens that truncated sampling kept at each position of a response; the sampled token is one of them.

    A position with 0 tokens was sampled from the full distribution, or was given.
    """

    ids: npt.NDArray[np.int32]  # [sum of counts], position after position
    counts: npt.NDArray[np.int32]  # [tokens]

    def __len__(self) -> int:
        return len(self.counts)

    @classmethod
    def of(cls, positions: Sequence[Sequence[int]]) -> KeptTokens:
        """Convert lists of token ids, one list for each position."""
        ids = np.fromiter((token for kept in positions for token in kept), np.int32)
        return cls(ids, np.array([len(kept) for kept in positions], np.int32))

    @classmethod
    def joined(cls, parts: Sequence[tuple[KeptTokens | None, int]]) -> KeptTokens | None:
        """Concatenate parts of a response, each with its number of tokens. Return None if no part has kept tokens."""
        known = [kept for kept, _ in parts if kept]
        counts = [kept.counts if kept else np.zeros(tokens, np.int32) for kept, tokens in parts]
        return cls(np.concatenate([kept.ids for kept in known]), np.concatenate(counts)) if known else None

    def first(self, tokens: int) -> KeptTokens:
        counts = self.counts[:tokens]
        return KeptTokens(self.ids[: counts.sum()], counts)

    def padded(self, width: int) -> npt.NDArray[np.int32]:
        """Return the ids as an array [tokens, width]; NO_TOKEN fills the rest of each row."""
        table = np.full((len(self), width), NO_TOKEN, np.int32)
        table[np.arange(width) < self.counts[:, None]] = self.ids
        return table


@dataclass(frozen=True)
class Prompt:
    """A prompt, rendered by the chat template and tokenized."""

    index: int  # row in the prompt set, stable over the run
    text: str  # all messages as the user wrote them, before the chat template; identifies the prompt
    tokens: tuple[int, ...]
    answer: str | None = None
    columns: dict[str, Any] = field(default_factory=dict)  # the full data row, for reward functions
    messages: tuple[Message, ...] = ()  # input of the chat template
    epoch: int = 0  # pass over the data in which the prompt is drawn
    column: str | None = None  # name of the column that holds the prompt


@dataclass(frozen=True)
class Sample:
    """A response to a prompt, with the rollout logprob and the weight version of each token.

    In an episode, the response holds all turns: generated tokens, and given tokens such as results of tools. An episode
    whose history was rewritten (forked) has several sequences: the last one is the Sample, the others are in `earlier`.
    """

    group_id: int  # group in which the advantage is normalized; unique in the run
    index: int  # position inside the group
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]  # the response, ending with the stop token unless truncated
    rollout_logprobs: tuple[float, ...]
    weight_versions: tuple[int, ...]
    truncated: bool
    text: str = ""
    reward: float = 0.0
    reward_terms: dict[str, float] = field(default_factory=dict)  # unweighted rewards by name of the term
    # False: a reward term failed, or none applied. `reward` is then the mean of the group, for display only.
    is_scored: bool = True
    step_rewards: StepRewards = ()  # process rewards
    extra: dict[str, Any] = field(default_factory=dict)  # values that reward functions passed to `log_extra`, by column
    verify_steps: int = 0  # verification steps of speculative decoding; 0: without speculative decoding
    is_correct: bool | None = None  # None: no reward term defines correctness
    generated: tuple[bool, ...] = ()  # per response token, False: given, not trained on; (): all were generated
    state: EpisodeState | None = None  # None: a single answer, no episode
    episode_reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)  # metrics of the episode by name
    messages: tuple[Message, ...] = ()  # messages of the episode after the prompt
    error: str = ""  # why the episode failed
    teacher_logprobs: tuple[float, ...] = ()  # logprobs of `tokens` under the teacher; (): without a teacher
    teacher_prompt: tuple[int, ...] = ()  # tokens before `tokens` for the policy as its own teacher; (): it is none
    teacher_topk: TopLogprobs | None = field(default=None, compare=False, repr=False)  # with distillation.topk
    # Experts that the engine chose, [total tokens - 1, MoE layers, top-k]: the engine does not compute the last token.
    # None: not requested, or not returned by the engine.
    routed_experts: ExpertIds | None = field(default=None, compare=False, repr=False)
    # With truncated sampling, the kept tokens of each token: `rollout_logprobs` are of the distribution over them.
    kept: KeptTokens | None = field(default=None, compare=False, repr=False)
    earlier: tuple[Sample, ...] = ()  # earlier sequences, oldest first; only their tokens and step rewards are used
    part: int = 0  # number of an earlier sequence, from 1 on; 0: the last or only sequence
    role: str = ""  # of the policy in this sequence of the episode

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError(f"sample {self.group_id}/{self.index} has no tokens")
        per_token: list[Any] = [self.rollout_logprobs, self.weight_versions]
        per_token += filter(None, (self.generated, self.teacher_logprobs, self.kept))
        if self.teacher_topk:
            per_token += [self.teacher_topk.ids, self.teacher_topk.logprobs]
        if {*map(len, per_token)} != {len(self.tokens)}:
            raise ValueError(f"sample {self.group_id}/{self.index}: its values per token differ in length")

    @classmethod
    def from_tokens(
        cls, number: int, prompt: Sequence[int], response: Sequence[int], generated: Sequence[bool] = ()
    ) -> Sample:
        zeros = (0,) * len(response)
        logprobs = tuple(map(float, zeros))
        mask = tuple(generated)
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
    """The `rollout.group_size` samples of a prompt."""

    prompt: Prompt
    samples: tuple[Sample, ...]
    finished: bool = True  # False: aborted, its samples are not scored


@dataclass(frozen=True)
class SampleInfo:
    """Lengths, rewards and metrics of a sample, without its tokens. Every rank has those of all samples."""

    group_id: int
    index: int
    prompt_tokens: int
    response_tokens: int
    reward: float
    truncated: bool
    oldest_version: int  # oldest weight version of a token, over all sequences
    reward_terms: dict[str, float] = field(default_factory=dict)
    step_rewards: StepRewards = ()
    prompt: int = 0  # index in the prompt set
    finished: bool = True  # False: the group was aborted
    versions_sum: int = 0  # sum of the weight versions of the response tokens, over all sequences
    is_correct: bool | None = None  # by the term `reward.correct`; None: unknown
    has_routed_experts: bool = False
    verify_steps: int = 0  # see Sample
    given_tokens: int = 0  # response tokens that were not generated, which are not trained on
    has_own_prompt: bool = False  # True: the prompt differs from that of the group
    teacher_prompt_tokens: int = 0  # of Sample.teacher_prompt
    state: EpisodeState | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    earlier: tuple[SampleInfo, ...] = ()  # earlier sequences of a forked episode, see Sample
    part: int = 0  # see Sample
    role: str = ""  # see Sample
    is_scored: bool = True  # see Sample

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
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens


@dataclass(frozen=True)
class RowRange:
    """Rows `start` to `start + count - 1` of a micro-batch."""

    start: int = 0
    count: int = 0


@dataclass(frozen=True)
class ReplayedChoices:
    """Choices to replay in layers of a rank, for some rows of their input: experts, or keys. On the host.

    Rows of a router's input: the tokens of the rank's context-parallel slice; with sequence parallelism, the part
    of the slice that the tensor-parallel rank holds. Rows of sparse attention: the tokens of the whole slice.
    """

    ranges: torch.Tensor  # int32 [m, 2], ascending: (first row, number of rows) of each consecutive range
    ids: torch.Tensor  # [rows, layers, top-k]: experts, uint8 or int16; or positions of keys in the sequence, int32
    keys: ReplayedChoices | None = None  # beside experts, with training.router_replay=R3_keys

    @property
    def rows(self) -> torch.Tensor:
        import torch

        starts, counts = self.ranges.long().unbind(1)
        return torch.arange(len(self.ids)) + (starts - counts.cumsum(0) + counts).repeat_interleave(counts)

    @property
    def nbytes(self) -> int:
        return self.ranges.nbytes + self.ids.nbytes


@dataclass
class MicroBatch:
    """Packed sequences: the input of one forward pass of the policy. Tensors have shape [T] unless noted.

    Position t predicts `targets[t]`, and per-token values belong to that target. `mask` is 1 for targets that are
    generated tokens of a response. Padding to the multiple that the layout needs forms a sequence of its own.
    """

    tokens: torch.Tensor  # int64
    positions: torch.Tensor  # int64, position within the sequence
    targets: torch.Tensor  # int64
    mask: torch.Tensor  # float32, 0 or 1
    lengths: tuple[int, ...]  # padded length of each packed sequence, shared prompts included; the sum is T
    sequence_index: torch.Tensor  # int64, index into `sample_ids` of the token's sequence; -1: padding
    sample_ids: tuple[int, ...]  # index of each packed sequence in the sample list of the update
    advantages: torch.Tensor  # float64
    loss_weights: torch.Tensor  # float64, weight of the token in the loss of the update
    rollout_logprobs: torch.Tensor  # float32
    old_logprobs: torch.Tensor | None = None  # float32; None: use the logprobs of the current pass, detached
    reference_logprobs: torch.Tensor | None = None  # float32
    teacher_logprobs: torch.Tensor | None = None  # float32; NaN: of no teacher; None: without a teacher
    # The teacher's k most likely tokens, int32 [T, k] with NO_TOKEN as padding, and their logprobs, float32 [T, k].
    teacher_topk_ids: torch.Tensor | None = None
    teacher_topk_logprobs: torch.Tensor | None = None
    # Set within a loss: the policy's logprobs of these k tokens and, last, of all other tokens together, float32
    # [k + 1, T], with gradient.
    topk_logprobs: torch.Tensor | None = None
    # With truncated sampling: the tokens kept when each target was sampled, int32 [T, k] with NO_TOKEN as padding; a
    # row of padding keeps all. All logprobs of the micro-batch are over the kept tokens.
    kept_ids: torch.Tensor | None = None
    # Set within a loss: log of the policy's probability of the kept tokens, float32, without gradient.
    kept_log_mass: torch.Tensor | None = None
    # With the optimal token baseline: sum over the vocabulary of the old policy's squared probabilities, float32.
    squared_probs: torch.Tensor | None = None
    # With a critic: value of the state before each target, float32, and its regression target, float64.
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    routed_experts: ReplayedChoices | None = None  # None: routers choose the experts, and indexers the keys
    prompt_rows: tuple[RowRange, ...] = ()  # per sequence, the rows of its shared prompt; (): no prompt is shared
    entropy_floor: float = -math.inf  # [nats]; tokens with a lower entropy are masked out of the loss
    entropy_weight: float = 0.0  # 1 / number of tokens in the update over which the entropy bonus is averaged
    # Weight, relative to `loss_weights`, of the loss on right answers, float64; None: a policy loss without it.
    positive: torch.Tensor | None = None
    # Mask of the tokens that Clip-Cov or KL-Cov selects in the update, bool; None: another policy loss.
    high_covariance: torch.Tensor | None = None
    # Targets of the multi-token-prediction layer: the token after `targets`, int64; its weight in the loss of the
    # update, float64; its rollout logprob, float32.
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
        """Return a copy of the micro-batch with all its own tensors on `device`."""
        import torch

        if self.tokens.device == device:
            return self
        moved: dict[str, Any] = {
            name: copy_to(value, device) for name, value in vars(self).items() if isinstance(value, torch.Tensor)
        }
        return replace(self, **moved)


def copy_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to `device`, asynchronously through pinned memory on GPUs."""
    if device.type != "cuda":
        return tensor.to(device)
    # A copy from pageable host memory would wait for all queued kernels.
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)
