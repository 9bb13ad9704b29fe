"""Metric rows about the machine: sync, time, speed, memory."""

from grpo_mp.monitor.metric import Metric

SYNC = (
    Metric("sync/weight_version", "updates", "Weight version the engines serve.", "rises by updates", "See the log."),
    Metric("sync/bytes", "bytes", "Bytes sent to one engine.", "size of the weights", "Other: see the mapping."),
    Metric("sync/bytes_per_s", "bytes/s", "Bytes of one engine over the time of SYNC.", "steady", "Other transport."),
    Metric("sync/buckets", "buckets", "Buckets sent to one engine.", "few tens", "Raise sync.bucket_bytes."),
    Metric(
        "sync/peak_bytes",
        "bytes",
        "Most memory the sync held beyond the weights, on the worst rank.",
        "at most 2 x sync.bucket_bytes",
        "Lower sync.bucket_bytes.",
    ),
    Metric(
        "sync/check/logprob_abs_diff/mean",
        "nats",
        "After the sync: mean absolute difference of engine and policy logprobs on the fixed prompts.",
        "1e-4 in fp32, 0.02 in bf16",
        "The run stops above its limit and names the worst tensor.",
        high=0.1,
    ),
    Metric(
        "sync/check/logprob_abs_diff/max",
        "nats",
        "The largest such difference.",
        "below 1",
        "As the mean.",
    ),
    Metric(
        "sync/check/tokens",
        "tokens",
        "Tokens compared after the sync; 32 times as many where the mean of the first was beyond its limit.",
        "steady",
        "More on single steps: a tie of two experts. On every step: look at the mean.",
    ),
)

TIME = (
    Metric(
        "time/step_s",
        "s",
        "Wall time of the step, without SAVE and EVAL.",
        "steady",
        "Look at the phases and at the trace.",
        known_as="slime perf/step_time, verl timing_s/step",
    ),
    Metric(
        "time/{phase}_s",
        "s",
        "Time inside one phase (generate, score, logprob, train, sync, save, eval), slowest rank.",
        "steady",
        "Open trace.json and look at that phase.",
        known_as="verl timing_s/*",
    ),
    Metric(
        "time/idle_share",
        "share",
        "Share of the step a rank waits for others (WAIT spans), mean over ranks.",
        "below 0.3",
        "High in generate: long answers hold the rest up. High in train: uneven micro-batches.",
        high=0.7,
        known_as="slime perf/wait_time_ratio",
    ),
    Metric(
        "time/overhead_share",
        "share",
        "Share of the step outside generate, logprob, train and sync work.",
        "below 0.05",
        "Slow reward or data: see score and the gaps in trace.json.",
        high=0.25,
    ),
)

SPEED = (
    Metric(
        "speed/generate_tokens_per_s",
        "tokens/s",
        "Response tokens of the step over the time of GENERATE, all engines.",
        "steady",
        "Raise engine.concurrent_groups or the engine's memory share.",
        known_as="slime perf/tokens_per_gpu_per_sec (times GPUs)",
    ),
    Metric(
        "speed/train_tokens_per_s",
        "tokens/s",
        "Packed tokens without padding over the time of TRAIN, all ranks.",
        "steady",
        "Raise optimizer.max_tokens_per_microbatch; less recompute.",
        known_as="slime perf/actor_train_tok_per_s",
    ),
    Metric(
        "speed/logprob_tokens_per_s",
        "tokens/s",
        "Packed tokens over the time of LOGPROB, all ranks.",
        "above training",
        "As train.",
    ),
    Metric("speed/samples_per_s", "samples/s", "Samples of the step over its wall time.", "steady", "See time/."),
    Metric(
        "speed/tokens_per_s_per_gpu",
        "tokens/s",
        "Prompt and response tokens over step time and ranks.",
        "steady",
        "See time/.",
        known_as="verl perf/throughput",
    ),
)

MEMORY = (
    Metric(
        "memory/{phase}/host_bytes",
        "bytes",
        "Host memory of the process at the end of the phase, largest rank.",
        "the same at every step",
        "Rises step by step: a leak; take a memory profile of that phase.",
        known_as="verl perf/cpu_memory_used_gb",
    ),
    Metric(
        "memory/{phase}/device_bytes",
        "bytes",
        "Device memory in use at the end of the phase, largest rank.",
        "the same at every step",
        "As host.",
    ),
    Metric(
        "memory/{phase}/peak_device_bytes",
        "bytes",
        "Most device memory allocated during the phase, largest rank.",
        "below the device's size with 5 % to spare",
        "Lower max_tokens_per_microbatch, recompute more, or lower the engine's memory share.",
        known_as="verl perf/max_memory_allocated_gb",
    ),
)
