"""Rules about the tokens of a response: how long it is and how much it repeats itself."""

from collections.abc import Sequence


def length_part(tokens: int, max_response_tokens: int) -> float:
    """Share of the response limit that was used: 0 to 1."""
    return min(1.0, tokens / max_response_tokens)


def overlong_part(tokens: int, max_response_tokens: int, buffer_tokens: int) -> float:
    """Soft overlong punishment: 0 up to the buffer, then linearly down to -1 at the limit.

    DAPO (arXiv 2503.14476), eq. 13, with L_max = max_response_tokens and L_cache = buffer_tokens.
    """
    return min(0.0, max(-1.0, (max_response_tokens - buffer_tokens - tokens) / buffer_tokens))


def repetition_part(tokens: Sequence[int], ngram: int) -> float:
    """-(share of n-grams that stood in the response before): 0 without repetition or below n tokens, above -1.

    Counts the same n-grams as the penalty of Yeo et al. (arXiv 2502.03373, appendix), who give it to the tokens of
    each repeated n-gram; as one number for the whole response it is this project's definition.
    """
    grams = [tuple(tokens[i : i + ngram]) for i in range(len(tokens) - ngram + 1)]
    return len(set(grams)) / len(grams) - 1 if grams else 0.0
