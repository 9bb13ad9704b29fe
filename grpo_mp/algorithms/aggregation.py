"""How token losses become one number: the weight of each response token in the update's loss.

Weights are computed from the lengths of the whole update, so the denominator is global before the first
backward, whatever the layout, micro-batch size or packing.
"""

from collections.abc import Sequence
from typing import Literal

Aggregation = Literal["sequence_mean", "token_mean"]


def token_weights(response_tokens: Sequence[int], aggregation: Aggregation) -> tuple[float, ...]:
    """Weight of each token of each sample; over all tokens of the update the weights sum to 1.

    sequence_mean: mean over samples of the mean over tokens (DeepSeekMath, eq. 3).
    token_mean: mean over all tokens of the update (DAPO, eq. 8).
    """
    if aggregation == "token_mean":
        return (1.0 / sum(response_tokens),) * len(response_tokens)
    return tuple(1.0 / (len(response_tokens) * tokens) for tokens in response_tokens)
