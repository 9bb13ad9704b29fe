"""Sections of the settings, except those of data, algorithms and rewards. Names of settings include the unit."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field, PositiveInt, field_validator, model_validator

from grpo_mp.config.registries import LOGGERS, ROLLOUT_FUNCTIONS
from grpo_mp.config.truncation import TopP, Truncation, truncation_of
from grpo_mp.models.families import MODEL_FAMILIES
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.utils.section import Section

AUTO_GROUPS = 64  # groups in flight that an engine is at least prepared for
DEFAULT_DTYPE = "bfloat16"  # model.dtype on GPUs
PauseMode = Literal["retract", "in_place"]
DecayRate = Annotated[float, Field(ge=0, lt=1)]
RolloutName = Annotated[str, AfterValidator(ROLLOUT_FUNCTIONS.check_name)]
FP8_ROWS = 16  # Megatron's get_fp8_align_size of the blockwise recipe
# With tensor parallelism, multiples of 128 keep the 128-token tiles equal before and after the all-gather, so that
# Transformer Engine gathers FP8 values instead of bfloat16.
GATHERED_FP8_ROWS = 128


class RunConfig(Section):
    """The run: its folder, length, checkpoints and evaluations."""

    folder: Path = Field(description="folder for all output of the run (TRL output_dir)")
    seed: int = Field(0, ge=0, lt=2**32, description="seed of data order, sampling and initialization")
    steps: int = Field(0, ge=0, description="total steps; may be raised later; 0: by epochs")
    epochs: float | None = Field(
        None, gt=0, description="passes over data.train, instead of steps (TRL num_train_epochs)"
    )
    save_every: int = Field(20, ge=0, description="steps between checkpoints; 0 saves only at the end")
    eval_every: int = Field(20, ge=0, description="steps between evaluations; 0 evaluates only before and after")
    keep_checkpoints: int = Field(2, ge=1, description="number of newest checkpoints to keep (TRL save_total_limit)")
    resume: Literal["auto", "never"] = Field(
        "auto", description="auto: resume from the newest checkpoint; never: refuse a folder that has one"
    )
    export: bool | Literal["fp8"] = Field(
        True, description="write a Hugging Face folder, final/, at the end; fp8: matrices in blockwise FP8, as DeepSeek"
    )
    export_every: int = Field(0, ge=0, description="steps between Hugging Face folders exports/step_N; 0: none")

    @model_validator(mode="after")
    def _check_length(self) -> "RunConfig":
        if not self.steps and self.epochs is None:
            raise ValueError("run.steps is missing: set it, or run.epochs")
        return self

    @property
    def exports_fp8(self) -> bool:
        return self.export == "fp8"

    @property
    def length(self) -> str:
        """Return the length of the run as text: "100 steps" or "2 epochs"."""
        return f"{self.steps} steps" if self.steps else f"{self.epochs:g} epochs"


ALL_LINEAR: Literal["all-linear"] = "all-linear"  # value of peft's target_modules


class LoraConfig(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685): the policy computes (W + alpha / rank * B A) x; W is frozen."""

    rank: int = Field(ge=1, le=2**16, description="rows of A, columns of B (peft r)")
    alpha: float = Field(gt=0, description="what they add is multiplied by alpha / rank (peft lora_alpha)")
    target_modules: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        ALL_LINEAR,
        description="Hugging Face modules with adapters, as in peft: q_proj, mlp.up_proj; all-linear: all "
        "projections of attention, dense layers and experts",
    )

    @property
    def targets(self) -> tuple[str, ...] | None:
        return None if self.target_modules == ALL_LINEAR else tuple(self.target_modules)

    @property
    def description(self) -> str:
        """Return rank, alpha and modules as text. Weights of adapters are valid only with these settings."""
        modules = self.target_modules if self.targets is None else " ".join(sorted(self.targets))
        return f"of rank {self.rank} and alpha {self.alpha:g} on {modules}"

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class ModelConfig(Section):
    """The policy, which is also the reference."""

    path: Path = Field(description="Hugging Face folder")
    family: Annotated[str, AfterValidator(MODEL_FAMILIES.check_name)] | None = Field(
        None, description="built-in family or your own 'file.py:FAMILY'; null: by model_type of config.json"
    )
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], BeforeValidator(lambda dtype: dtype or DEFAULT_DTYPE)
    ] = Field(
        None,
        validate_default=True,
        description="precision of weights and activations; null: bfloat16 on GPUs, float32 on a CPU; "
        "float16: the loss is scaled",
    )
    fp32_head: bool = Field(True, description="logits in float32, also in engines (SGLang enable_fp32_lm_head)")
    trust_remote_code: bool = Field(
        False,
        description="run Python code that model folders ship: the class of a tokenizer without tokenizer.json, and a "
        "config's in the engines",
    )
    mtp_loss_scaling_factor: float = Field(
        0.0,
        ge=0,
        description="weight of the multi-token-prediction loss, which trains that layer alone (Megatron's name); "
        "0: the layer stays unchanged",
    )
    lora: LoraConfig | None = Field(
        None, description="train low-rank adapters and freeze all weights; null: train all weights"
    )

    @property
    def trains_mtp(self) -> bool:
        return self.mtp_loss_scaling_factor > 0

    def read_config(self) -> HfConfig:
        """Read config.json of the model folder."""
        return HfConfig.read(self.path, self.family, trains_mtp=self.trains_mtp)

    @property
    def offloads(self) -> bool:
        """Return whether policy and engine offload from a GPU in turn.

        With float32 they do not, since the optimizer updates the model's own weights in place.
        """
        return self.dtype != "float32"


class LayoutConfig(Section):
    """Sizes of the parallel dimensions that divide the model of the trainer; the remaining ranks are data parallel."""

    tensor: int = Field(1, ge=1, description="ranks over which attention and dense layers are divided")
    pipeline: int = Field(1, ge=1, description="stages into which the layers are divided")
    virtual_pipeline: int | None = Field(
        None, ge=2, description="model chunks per pipeline stage, to reduce idle time; null: one"
    )
    context: int = Field(1, ge=1, description="ranks over which each sequence is divided; for long responses")
    expert: int = Field(1, ge=1, description="ranks over which the experts of a layer are divided")
    expert_tensor: int = Field(1, ge=1, description="ranks over which each expert is divided")

    @property
    def model_parallel(self) -> int:
        return self.tensor * self.context * self.pipeline

    @property
    def microbatch_multiple(self) -> int:
        """Return the number that the micro-batches of an update are a multiple of: 1 unless stages are interleaved."""
        return self.pipeline if self.virtual_pipeline else 1


class EpisodeLimits(Section):
    """Limits of an episode: one that reaches them is a sample with the state `truncated` or `timeout`."""

    turns: int = Field(8, ge=1, description="answers of the policy in an episode (verl max_assistant_turns)")
    turn_tokens: int | None = Field(
        None, gt=0, description="maximum tokens of one turn; null: what is left of the response"
    )
    tool_s: float = Field(10.0, gt=0, description="time limit of one call of a tool, in seconds")
    tool_characters: int = Field(4096, gt=0, description="characters of a tool's result that the policy sees")
    episode_s: float = Field(300.0, gt=0, description="time limit of an episode, in seconds")


class RolloutConfig(Section):
    """What a step generates: prompts_per_step groups of group_size samples."""

    prompts_per_step: int = Field(gt=0, description="prompts of one step (verl train_batch_size)")
    group_size: int = Field(gt=0, description="samples for each prompt (TRL num_generations, verl rollout.n)")
    max_prompt_tokens: int = Field(
        gt=0,
        description="longer train prompts are left out, longer eval prompts count as wrong (verl max_prompt_length)",
    )
    max_response_tokens: int = Field(gt=0, description="maximum tokens of a response (TRL max_completion_length)")
    temperature: float = Field(1.0, ge=0.001, description="sampling temperature; logprobs in training use it, too")
    top_p: TopP = Field(
        1.0,
        description="mass of nucleus sampling, or limits by name: {top_p: 0.95, top_k: 20, min_p: 0.05} (TRL, verl, "
        "slime names). Logprobs are then of the kept tokens, at most 1024 of a position",
    )
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (), description="texts that end a response, in addition to the model's end token"
    )
    max_staleness: int = Field(
        0,
        ge=0,
        description="largest age of a group's first weights, in steps. Free slots generate for later steps; "
        "unfinished groups resume with the new weights (slime --partial-rollout). 0: newest weights "
        "only; one_step_off: 1",
    )
    tokens_ahead: int | None = Field(
        None,
        gt=0,
        description="tokens that a step adds to responses of later steps (Kimi k1.5), so that no clock decides "
        "which weights draw a token; null: as many as there is time for",
    )
    group_timeout_s: float = Field(
        600.0,
        gt=0,
        description="time limit of a group, in seconds; a slower one is replaced by the next prompt, or counts "
        "as wrong in an evaluation",
    )
    tools: tuple[str, ...] = Field(
        (),
        description="typed functions, or classes whose methods are tools: 'module:name' or 'file.py:name' (TRL "
        "tools, environment_factory)",
    )
    tool_args: dict[str, dict[str, Any]] = Field(
        {}, description="arguments of classes of tools, by their paths as set in tools"
    )
    tool_environment: tuple[str, ...] = Field(
        (), description="environment variables that tools get, besides PATH and HOME"
    )
    tool_parser: str | None = Field(
        None, description="SGLang's parser of tool calls: qwen25, deepseekv3, glm45, kimi_k2, gpt-oss, ..."
    )
    function: RolloutName | None = Field(
        None,
        description="rolls out an episode: call_tools, openai_agent, verifiers, or your own 'file.py:function'; "
        "null: one answer, or call_tools with tools",
    )
    function_args: dict[str, Any] = Field({}, description="arguments of the function by name")
    limits: EpisodeLimits = Field(EpisodeLimits(), description="limits of an episode of several turns")
    dump: bool = Field(
        False,
        description="write all samples into RUN/rollouts_dump, from which `train --replay` trains without engines",
    )
    failed: Literal["mask", "score"] | float = Field(
        "mask",
        description="failed episodes. mask: they count in their group and are not trained on; score: as others; "
        "a number: their reward",
    )

    @property
    def rollout_function(self) -> str | None:
        """Return the name of the function that rolls out episodes, or None if a rollout is a single answer."""
        return self.function or ("call_tools" if self.tools else None)

    @property
    def truncation(self) -> Truncation:
        return truncation_of(self.top_p)

    @property
    def max_sequence_tokens(self) -> int:
        return self.max_prompt_tokens + self.max_response_tokens


class SpeculativeConfig(Section):
    """Speculative decoding: an engine drafts tokens, and one step of the model verifies them. On GPUs only."""

    algorithm: Literal["none", "mtp", "ngram"] = Field(
        "none",
        description="mtp: the model's multi-token-prediction layer drafts (SGLang NEXTN); ngram: earlier text "
        "drafts (SGLang NGRAM)",
    )
    num_steps: int = Field(3, ge=1, description="drafted tokens for each verification (SGLang's name)")

    @property
    def drafts_by_mtp(self) -> bool:
        return self.algorithm == "mtp"

    @property
    def verified_tokens(self) -> int:
        return self.num_steps + 1 if self.algorithm != "none" else 1


class EngineConfig(Section):
    """The SGLang engines that generate, on the devices of the trainer or on their own."""

    gpus_per_engine: int = Field(1, ge=1, description="consecutive ranks that one engine spans (SGLang tp_size)")
    ranks: int = Field(
        0, ge=0, description="last ranks of the job, which only generate, with schedule=one_step_off or async"
    )
    max_restarts: int = Field(3, ge=0, description="restarts of an engine within an hour; one more loss ends the run")
    concurrent_groups: PositiveInt | Literal["auto"] = Field(
        "auto", description="groups in flight on one engine; auto: as many as its KV cache has room for"
    )
    speculative: SpeculativeConfig = Field(
        SpeculativeConfig(), description="speculative decoding, on GPUs (SGLang speculative_algorithm)"
    )
    deterministic: bool = Field(
        False,
        description="draw every sample with its own seed (SGLang enable_deterministic_inference), so that a run "
        "repeats its answers; slower on GPUs",
    )
    args: dict[str, Any] = Field({}, description="any argument of the installed SGLang, checked by name")

    def most_groups(self, rollout: RolloutConfig) -> int:
        """Return the most groups in flight that an engine is prepared for: with `auto`, the groups of a few steps."""
        if self.concurrent_groups == "auto":
            return max(AUTO_GROUPS, rollout.prompts_per_step * (1 + rollout.max_staleness))
        return self.concurrent_groups

    @property
    def owns_devices(self) -> bool:
        """Return whether the engines have devices of their own, which the trainer never uses."""
        return self.ranks > 0

    @property
    def has_fp8_cache(self) -> bool:
        return "fp8" in str(self.args.get("kv_cache_dtype"))


class OptimizerConfig(Section):
    """AdamW and its learning rate. Updates are counted, not steps."""

    lr: float = Field(gt=0, description="highest learning rate")
    min_lr: float = Field(0.0, ge=0, description="learning rate at the end of the schedule")
    warmup_updates: int = Field(0, ge=0, description="updates over which the learning rate rises to lr")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="decay from lr to min_lr (TRL lr_scheduler_type, Megatron lr_decay_style)"
    )
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay of AdamW")
    betas: tuple[DecayRate, DecayRate] = Field(
        (0.9, 0.98), description="decay rates of Adam's first and second moments"
    )
    eps: float = Field(1e-8, gt=0, description="number added to the root of Adam's second moment")
    clip_grad: float = Field(1.0, ge=0, description="largest gradient norm (TRL max_grad_norm); 0: no clipping")
    skip_grad_norm: float | None = Field(
        None, gt=0, description="gradient norm above which an update is skipped; null: only if it is not finite"
    )
    offload: Literal["none", "step", "host"] = Field(
        "step",
        description="optimizer state of a GPU. none: stays on the device; step: on the host while engines "
        "generate; host: always on the host",
    )

    @model_validator(mode="before")
    @classmethod
    def _is_adamw(cls, value: Any) -> Any:
        if isinstance(value, str):
            why = (
                "; Megatron-Core's Muon excludes the distributed optimizer, whose state resumes in any layout, and "
                "needs the package emerging_optimizers, which PyPI does not have"
            )
            reason = why if "muon" in value.lower() else ""
            raise ValueError(f"{value} is not offered, the optimizer is AdamW{reason}: set e.g. optimizer={{lr: 1e-6}}")
        return value


class TrainingConfig(Section):
    """How a step's samples become updates, and how the trainer uses memory."""

    updates_per_step: int = Field(1, ge=1, description="mini-batches of a step's samples, one optimizer update each")
    epochs: int = Field(
        1, ge=1, description="passes over a step's samples: mu of GRPO, TRL num_iterations, verl ppo_epochs"
    )
    shuffle: bool = Field(False, description="samples go to the updates at random; false: complete groups in order")
    max_tokens_per_microbatch: int = Field(
        4096, gt=0, description="tokens packed into one forward (verl ppo_max_token_len_per_gpu)"
    )
    share_prompts: bool = Field(
        False, description="compute a prompt once for all its responses; for long prompts; not with context parallelism"
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none", description="activations to recompute in the backward pass, to save memory"
    )
    fp8_format: Literal["e4m3", "hybrid"] | None = Field(
        None,
        description="FP8 in linear layers (Megatron --fp8-format), scaled in blocks as DeepSeek-V3; not yet run on a "
        "GPU; null: model.dtype",
    )
    router_replay: Literal["none", "R2", "R3", "R3_keys"] = Field(
        "none",
        description="routing in training (verl router_replay). R3: the engine's experts (slime "
        "--use-rollout-routing-replay); R2: those of the old-logprob pass (slime "
        "--use-routing-replay); R3_keys: as R3, and the engine's keys of sparse attention, for short sequences",
    )
    logprob_chunk_tokens: int = Field(1024, gt=0, description="tokens whose logits are computed at a time")
    megatron_args: dict[str, Any] = Field({}, description="any field of Megatron's configs, checked by name")

    @property
    def replays_engine(self) -> bool:
        """Return whether training replays choices of the engine."""
        return self.router_replay in ("R3", "R3_keys")

    @property
    def replays_keys(self) -> bool:
        """Return whether training replays the keys that the engine's indexers chose."""
        return self.router_replay == "R3_keys"

    def padding_multiple(self, layout: LayoutConfig) -> int:
        """Return the number of tokens that divides every micro-batch; 1 without FP8.

        FP8 products need a multiple of a fixed number of rows on each rank.
        """
        if not self.fp8_format:
            return 1
        rows = GATHERED_FP8_ROWS if layout.tensor > 1 else FP8_ROWS
        return rows * layout.tensor * layout.context


class SyncConfig(Section):
    """Weights from the trainer to the engines after each step."""

    bucket_bytes: ByteSize | None = Field(
        None,
        gt=0,
        description="memory of a rank for weights in transfer, at least four times the largest tensor; null: 1 "
        "GiB or that",
    )
    pause: PauseMode = Field(
        "retract",
        description="running requests at a sync with schedule=async. retract: recompute their cache; in_place: keep it",
    )
    check_tolerance: float | None = Field(
        None,
        gt=0,
        description="allowed mean logprob difference of engine and policy after a sync, in nats; null: 1.5 times "
        "the measured rounding noise",
    )


class CriticConfig(Section):
    """The value model of algorithm ppo, trained beside the policy on its ranks and in its layout.

    It may be of another family and size than the policy. Updates of a step, and all of `optimizer` but the learning
    rate, are the policy's.
    """

    path: Path | None = Field(
        None,
        description="model folder with the policy's vocabulary, or a reward model whose head is kept; null: "
        "model.path (verl critic.model.path, TRL reward_model_path)",
    )
    lr: float = Field(
        1e-5, gt=0, description="highest learning rate, on the schedule of optimizer (verl critic.optim.lr)"
    )
    cliprange_value: float = Field(0.2, gt=0, description="largest change of a value in an update (TRL, verl)")
    warmup_steps: int = Field(0, ge=0, description="first steps, in which only the critic learns (verl critic_warmup)")


class MetricGuard(Section):
    """Limits of a metric; outside them the run stops, and the last checkpoint stays."""

    min: float | None = Field(None, description="least value; null: none")
    max: float | None = Field(None, description="greatest value; null: none")
    max_drop: float | None = Field(
        None, ge=0, description="largest fall of the mean over `steps` below its best value; null: any"
    )
    steps: int = Field(1, ge=1, description="steps in a row that must be outside, or that a mean is of")

    @model_validator(mode="after")
    def _has_a_limit(self) -> "MetricGuard":
        if self.min is None and self.max is None and self.max_drop is None:
            raise ValueError("set one of min, max and max_drop")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min:g} is above max {self.max:g}: every value would be outside")
        return self


class MonitorConfig(Section):
    """Metrics, logs and time limits."""

    loggers: dict[str, dict[str, Any]] = Field(
        {"tensorboard": {}, "jsonl": {}},
        description="tensorboard, jsonl, wandb, mlflow, trackio, or your own 'file.py:Class', each with its "
        "arguments; also a name or a list (TRL report_to, verl trainer.logger)",
    )
    report: bool = Field(
        True, description="write RUN/report.html and RUN/trace.json when the run ends, as `grpo-mp report` does"
    )
    guards: dict[str, MetricGuard] = Field(
        {},
        description="limits of metrics by name, as {train/entropy: {min: 0.02, steps: 5}, reward/mean: "
        "{max_drop: 0.3, steps: 10}}; outside them the run stops",
    )
    phase_timeout_s: float = Field(
        3600.0, gt=0, description="time limit of a phase, and of a wait for other ranks, in seconds"
    )

    @field_validator("loggers", mode="before")
    @classmethod
    def _loggers_from_names(cls, value: Any) -> Any:
        names = [value] if isinstance(value, str) else value
        is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
        return {name: {} for name in names} if is_list else value

    @field_validator("loggers")
    @classmethod
    def _loggers_exist(cls, value: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        return {LOGGERS.check_name(name): arguments for name, arguments in value.items()}
