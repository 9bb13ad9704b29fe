"""What is allowed at a start and worth a sentence: settings that do nothing, a mismatch that nothing corrects. Pure."""

from collections.abc import Iterator

from grpo_mp.algorithms.settings import Algorithm, Clip
from grpo_mp.config import Settings


def start_warnings(settings: Settings, fp8: bool) -> tuple[str, ...]:
    """Collect one sentence for each; `fp8`: engines compute in blockwise FP8."""
    cache = str(settings.engine.args.get("kv_cache_dtype", ""))
    return (*_ratio_is_one(settings), *_nothing_corrected(settings.algorithm, fp8 or cache.startswith("fp8")))


def _ratio_is_one(settings: Settings) -> Iterator[str]:
    algorithm = settings.algorithm
    if settings.optimizer_steps_per_step > 1 or algorithm.old_logprobs == "engine":
        return
    corrected = (
        algorithm.surrogate == "vespo" and algorithm.correction.kind != "none"
    )  # its weight holds that ratio too
    idle = [
        *([f"ratio={algorithm.ratio}"] if algorithm.ratio != "token" else []),
        *(
            [f"surrogate={algorithm.surrogate}"]
            if algorithm.surrogate not in ("clip", "none") and not corrected
            else []
        ),
        *(["clip"] if algorithm.surrogate == "clip" and algorithm.clip != Clip() else []),
    ]
    if idle:
        yield (
            f"algorithm.preset={algorithm.preset}: with one update a step (optimizer.updates_per_step and "
            f"optimizer.epochs are 1) every importance ratio is 1, and {', '.join(idle)} does nothing: set 2 or more"
        )


def _nothing_corrected(algorithm: Algorithm, fp8: bool) -> Iterator[str]:
    if fp8 and algorithm.correction.kind == "none" and algorithm.old_logprobs == "recomputed":
        yield (
            "engines compute in FP8 and algorithm.correction is none: samples come from other probabilities than the "
            "policy's, and accuracy is known to drop: set algorithm.correction={kind: truncate, high: 2.0}"
        )
