"""Rewards by the tokens of a response: how many there are, and how much they repeat."""

from collections.abc import Sequence


def length_reward(tokens: int, max_response_tokens: int) -> float:
    """Return the used share of the response limit: 0 to 1."""
    return min(1.0, tokens / max_response_tokens)


def overlong_penalty(tokens: int, max_response_tokens: int, buffer_tokens: int) -> float:
    """Compute the soft overlong punishment: 0 up to the buffer, then linearly down to -1 at the limit.

    DAPO (arXiv 2503.14476), eq. 13, with L_max = max_response_tokens and L_cache = buffer_tokens.
    """
    return min(0.0, max(-1.0, (max_response_tokens - buffer_tokens - tokens) / buffer_tokens))


def repetition_penalty(tokens: Sequence[int], ngram: int) -> float:
    """Return -(share of n-grams that stood in the response before): 0 without repetition or below n tokens, above -1.

    Counts the same n-grams as the penalty of Yeo et al. (arXiv 2502.03373, appendix), who give it to the tokens of
    each repeated n-gram; as one number for the whole response it is this project's definition.
    """
    grams = [tuple(tokens[i : i + ngram]) for i in range(len(tokens) - ngram + 1)]
    return len(set(grams)) / len(grams) - 1 if grams else 0.0
