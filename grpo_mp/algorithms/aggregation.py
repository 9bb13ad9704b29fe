"""Loss aggregation: the weight of each response token in the update's loss.

Weights are computed from the lengths of the full update, so the denominator is global before the first
backward, whatever the layout, micro-batch size or packing.
"""

from collections.abc import Sequence

import torch

from grpo_mp.algorithms.settings import AlgorithmConfig
from grpo_mp.types import PerToken


def token_weights(
    response_tokens: Sequence[int], learns: Sequence[bool], algorithm: AlgorithmConfig, max_response_tokens: int
) -> list[PerToken]:
    """Return the weight of each token of each of the update's samples; 0 for a sample that does not learn.

    sequence_mean: mean over samples of the mean over tokens (DeepSeekMath, eq. 3).
    token_mean: mean over all tokens that learn (DAPO, eq. 8).
    sequence_sum: mean over samples of the sum over tokens (LUSPO; RLOO).
    constant: sum over tokens / (samples x max_response_tokens) (Dr. GRPO).
    decoupled: mean over samples of control_token_weight x first token + mean of the others (Thinkless, eq. 5).
    A sample that does not learn counts as a sample, its tokens do not count as tokens, as in TRL.
    """
    samples = len(response_tokens)
    learning_tokens = sum(tokens for tokens, learn in zip(response_tokens, learns, strict=True) if learn)

    def weight(tokens: int) -> PerToken:
        match algorithm.aggregation:
            case "token_mean":
                return 1.0 / learning_tokens
            case "sequence_sum":
                return 1.0 / samples
            case "constant":
                return 1.0 / (samples * max_response_tokens)
            case "decoupled":
                weights = torch.full((tokens,), 1.0 / max(1, tokens - 1), dtype=torch.float64)
                weights[0] = algorithm.control_token_weight
                return weights / samples
            case "sequence_mean":
                return 1.0 / (samples * tokens)

    return [weight(tokens) if learn else 0.0 for tokens, learn in zip(response_tokens, learns, strict=True)]
