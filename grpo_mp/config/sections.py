"""The sections of the settings that belong to no other package. Units are part of the names."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from grpo_mp.config.lora_section import LoraConfig
from grpo_mp.config.registries import ROLLOUT_FUNCTIONS
from grpo_mp.config.speculative_section import SpeculativeConfig
from grpo_mp.models.families import MODEL_FAMILIES
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.utils.section import Section, as_bytes

PIECE_BYTES = 2**30
DEFAULT_DTYPE = "bfloat16"  # of weights and activations, where nothing says that a CPU computes
PauseMode = Literal["retract", "in_place"]
DecayRate = Annotated[float, Field(ge=0, lt=1)]
RolloutName = Annotated[str, AfterValidator(ROLLOUT_FUNCTIONS.check_name)]


class RunConfig(Section):
    """The run: its folder, length, checkpoints and evaluations."""

    folder: Path = Field(description="folder for all output of the run (TRL output_dir)")
    seed: int = Field(0, ge=0, lt=2**32, description="seed of data order, sampling and initialization")
    steps: int = Field(
        0, ge=0, description="total steps; each generates, scores, trains and syncs; may be raised; 0: by epochs"
    )
    epochs: float | None = Field(
        None,
        gt=0,
        description="times to go through data.train, instead of steps (TRL num_train_epochs): steps become epochs x "
        "prompts of an epoch / rollout.prompts_per_step, rounded up; prompts in place of groups that a filter drops "
        "are not counted",
    )
    save_every: int = Field(20, ge=0, description="steps between checkpoints; 0 saves only at the end")
    eval_every: int = Field(20, ge=0, description="steps between evaluations; 0 evaluates only before and after")
    keep_checkpoints: int = Field(2, ge=1, description="number of newest checkpoints to keep (TRL save_total_limit)")
    async_save: bool = Field(
        True,
        description="write a checkpoint's optimizer state while the next step generates, and the weights, unless a "
        "reference is swapped with them or they leave the GPU for the engines; false: before it",
    )
    piece_bytes: int = Field(
        PIECE_BYTES,
        gt=0,
        description="host memory of a rank that a save or load takes: tensors are written and read in such pieces, of "
        "one row at least; an export holds one file of at most 1 GiB and one tensor, whatever this is",
    )
    resume: Literal["auto", "never"] = Field(
        "auto", description="auto: resume from the newest checkpoint of the folder; never: refuse a folder that has one"
    )
    export: bool = Field(True, description="write a Hugging Face folder, final/, at the end")
    export_every: int = Field(
        0, ge=0, description="steps between Hugging Face folders, exports/step_N, while the run goes on; 0: none"
    )
    export_fp8: bool = Field(False, description="write exported matrices in blockwise FP8, as DeepSeek releases them")

    @model_validator(mode="after")
    def _check_length(self) -> "RunConfig":
        if not self.steps and self.epochs is None:
            raise ValueError("run.steps is missing: set it, or run.epochs")
        return self

    @property
    def length(self) -> str:
        """Return how long the run is, in words."""
        return f"{self.steps} steps" if self.steps else f"{self.epochs:g} epochs"

    _parse_unit = field_validator("piece_bytes", mode="before")(as_bytes)


class ModelConfig(Section):
    """The policy, which is also the reference."""

    path: Path = Field(description="a Hugging Face or converted folder; the architecture comes from its config.json")
    family: Annotated[str, AfterValidator(MODEL_FAMILIES.check_name)] | None = Field(
        None, description="a built-in family's name or your own 'file.py:FAMILY'; null: by model_type of config.json"
    )
    dtype: Annotated[Literal["float32", "bfloat16"], BeforeValidator(lambda dtype: dtype or DEFAULT_DTYPE)] = Field(
        None,
        validate_default=True,
        description="precision of weights and activations; null: bfloat16 on GPUs and in plans, float32 in a job on a "
        "CPU, whose products of bfloat16 are slow",
    )
    fp32_head: bool = Field(True, description="logits in float32, in engines, too (SGLang enable_fp32_lm_head)")
    trust_remote_code: bool = Field(
        False,
        description="run Python code that model folders ship: the class of a tokenizer without tokenizer.json, and a "
        "config's in the engines. false: the pattern of a tiktoken tokenizer is read from its class, which does not "
        "run; other code is refused",
    )
    mtp_loss_scaling_factor: float = Field(
        0.0,
        ge=0,
        description="weight of the loss of the multi-token-prediction layer (Megatron mtp_loss_scaling_factor), which "
        "then follows the policy: it learns the tokens that are trained on, nothing else learns from it, engines that "
        "draft with it get its weights; 0: it is carried unchanged",
    )
    lora: LoraConfig | None = Field(
        None, description="train low-rank adapters and freeze all weights; engines get W + alpha / rank B A; null: all"
    )

    @property
    def trains_mtp(self) -> bool:
        """Return whether the multi-token-prediction layer is part of the policy."""
        return self.mtp_loss_scaling_factor > 0

    def read_config(self) -> HfConfig:
        """Read its config.json. Raises UserError where it is missing or not a JSON object."""
        return HfConfig.read(self.path, self.family, trains_mtp=self.trains_mtp)

    @property
    def offloads(self) -> bool:
        """Return whether policy and engine leave a GPU for each other: a float32 optimizer works on the weights."""
        return self.dtype == "bfloat16"


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
        """Return the ranks over which one replica of the dense parameters is divided."""
        return self.tensor * self.context * self.pipeline

    @property
    def microbatch_multiple(self) -> int:
        """Return the number of micro-batches that a pipeline schedule takes at a time: 1 unless it is interleaved."""
        return self.pipeline if self.virtual_pipeline else 1


class EpisodeLimits(Section):
    """Limits of an episode: one that reaches them is a sample with the state `truncated` or `timeout`."""

    turns: int = Field(8, ge=1, description="answers of the policy in an episode (verl max_assistant_turns)")
    turn_tokens: int | None = Field(
        None, gt=0, description="maximum tokens of one answer; null: what is left of rollout.max_response_tokens"
    )
    tool_s: float = Field(10.0, gt=0, description="time limit of one call of a tool, in seconds")
    tool_characters: int = Field(4096, gt=0, description="characters of a tool's result that the policy is shown")
    episode_s: float = Field(
        300.0, gt=0, description="time limit of an episode, in seconds; an answer that is being generated may end later"
    )


class RolloutConfig(Section):
    """What a step generates: prompts_per_step groups of group_size samples."""

    prompts_per_step: int = Field(gt=0, description="prompts of one step (verl train_batch_size)")
    group_size: int = Field(gt=0, description="samples for each prompt (TRL num_generations, verl rollout.n)")
    max_prompt_tokens: int = Field(
        gt=0,
        description="longer train prompts are left out, longer eval prompts count as wrong; none is cut (verl "
        "max_prompt_length)",
    )
    max_response_tokens: int = Field(gt=0, description="maximum tokens of a response (TRL max_completion_length)")
    temperature: float = Field(1.0, ge=0.001, description="sampling temperature; logprobs in training use it, too")
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="mass of nucleus sampling; below 1 a start warns: logprobs are of the full distribution, so cut "
        "tokens lose probability whatever the reward",
    )
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (), description="texts that end a response, in addition to the model's end token"
    )
    max_staleness: int = Field(
        0,
        ge=0,
        description="steps that the weights which begin a group may be behind those of the step that trains on it. "
        "While the last groups of a step run, free slots generate for later steps; what is unfinished is paused, and "
        "goes on with the new weights (partial rollouts, slime --partial-rollout). 0: all samples are of the newest "
        "weights; with schedule=one_step_off it is 1, with async 1 or more",
    )
    tokens_ahead: int | None = Field(
        None,
        gt=0,
        description="tokens that a step adds to a response of a later one (a fixed budget of partial rollouts, Kimi "
        "k1.5). A step begins all groups that max_staleness lets it begin, and ends when each has its tokens: which "
        "weights draw a token does not depend on the clock. null: free slots begin them, until the step has its groups",
    )
    group_timeout_s: float = Field(
        600.0,
        gt=0,
        description="time limit of a group in a step, in seconds; pauses for new weights do not count. One that takes "
        "longer is aborted and replaced by the next prompt, or in an evaluation counts as empty answers",
    )
    tools: tuple[str, ...] = Field(
        (),
        description="what the policy may call: typed functions, or classes whose methods are tools, each as "
        "'module:name' or 'file.py:name' (TRL tools, environment_factory); results count in max_response_tokens",
    )
    tool_args: dict[str, dict[str, Any]] = Field(
        {}, description="arguments of classes of tools, by their paths as set in tools"
    )
    tool_environment: tuple[str, ...] = Field(
        (),
        description="variables of the run that tools find, beside PATH, HOME and the like: "
        "keys of trackers and judges are not their business",
    )
    tool_parser: str | None = Field(
        None, description="SGLang's parser of the model's tool calls: qwen25, deepseekv3, glm45, kimi_k2, llama3, ..."
    )
    function: RolloutName | None = Field(
        None,
        description="rolls out one task over several turns: call_tools, openai_agent, verifiers, or your own "
        "'file.py:function'; null: call_tools with rollout.tools, else one answer",
    )
    function_args: dict[str, Any] = Field(
        {},
        description="arguments of the function, by name: agent or command of openai_agent, environment and args of "
        "verifiers",
    )
    limits: EpisodeLimits = Field(EpisodeLimits(), description="limits of an episode of several turns")
    dump: bool = Field(
        False,
        description="write all samples of each step into RUN/rollouts_dump, one Parquet file a rank: tokens, mask, "
        "logprobs, rewards, routed experts; `train --replay` trains from it without engines",
    )
    failed: Literal["mask", "score"] | float = Field(
        "mask",
        description="episodes that end in an error or by limits.episode_s. mask: they count in their group and train "
        "nothing; score: as any other; a number: their reward",
    )

    @property
    def rollout_function(self) -> str | None:
        """Return the name of the function that rolls out episodes; None where a rollout is one answer."""
        return self.function or ("call_tools" if self.tools else None)

    @property
    def max_sequence_tokens(self) -> int:
        """Return the tokens of the longest training sample."""
        return self.max_prompt_tokens + self.max_response_tokens


class EngineConfig(Section):
    """The SGLang engines that generate, on the devices of the trainer or on their own."""

    gpus_per_engine: int = Field(1, ge=1, description="consecutive ranks that one engine spans (SGLang tp_size)")
    ranks: int = Field(
        0,
        ge=0,
        description="ranks, the last of the job, that engines have for themselves with schedule=one_step_off or async; "
        "the others train",
    )
    max_restarts: int = Field(
        3,
        ge=0,
        description="times that an engine which died, does not answer or computes something else than the policy is "
        "started again within an hour; its groups go to the others meanwhile. One more loss ends the run",
    )
    concurrent_groups: int = Field(64, gt=0, description="groups in flight on one engine; more fill it better")
    speculative: SpeculativeConfig = Field(
        SpeculativeConfig(),
        description="drafts that one step of the model verifies (SGLang speculative_algorithm); GPUs only",
    )
    deterministic: bool = Field(
        False,
        description="draw every sample with a seed of its own (SGLang enable_deterministic_inference, sampling_seed): "
        "a function of run.seed, the prompt, the epoch, the index in the group and the turn; an evaluation's, of its "
        "set's name. On a CPU in float32 tokens and logprobs are the same bits in any company; GPUs take SGLang's "
        "batch-invariant kernels",
    )
    args: dict[str, Any] = Field({}, description="any argument of the installed SGLang, checked by name")


class OptimizerConfig(Section):
    """AdamW and its learning rate. Updates are counted, not steps."""

    lr: float = Field(gt=0, description="highest learning rate")
    min_lr: float = Field(0.0, ge=0, description="learning rate at the end of the schedule")
    warmup_updates: int = Field(0, ge=0, description="updates over which the learning rate rises to lr")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="shape of the decay from lr to min_lr (TRL lr_scheduler_type, Megatron lr_decay_style)"
    )
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay of AdamW")
    betas: tuple[DecayRate, DecayRate] = Field(
        (0.9, 0.98), description="decay rates of Adam's first and second moments"
    )
    eps: float = Field(1e-8, gt=0, description="number added to the root of Adam's second moment")
    clip_grad: float = Field(
        1.0, ge=0, description="norm to which the full gradient is clipped (TRL max_grad_norm); 0: no clipping"
    )
    skip_grad_norm: float | None = Field(
        None,
        gt=0,
        description="norm of the full gradient, before clipping, above which an update is skipped; null: only where it "
        "is not finite",
    )
    max_skipped_updates: int = Field(
        3,
        ge=0,
        description="skipped updates in a row, of the policy or of a critic, after which the run stops; 0: never",
    )
    offload: Literal["none", "step", "host"] = Field(
        "step",
        description="where a GPU's optimizer state is. none: always on the device; step: on the host while engines "
        "generate; host: always there, and updates take it through the device in pieces",
    )


class TrainingConfig(Section):
    """How a step's samples become updates, and how the trainer uses memory."""

    updates_per_step: int = Field(
        1,
        ge=1,
        description="mini-batches of a step's samples, one optimizer update each",
    )
    epochs: int = Field(
        1, ge=1, description="passes over a step's samples: mu of GRPO, TRL num_iterations, verl ppo_epochs"
    )
    shuffle: bool = Field(False, description="samples go to the updates at random; false: complete groups in order")
    max_tokens_per_microbatch: int = Field(
        4096,
        gt=0,
        description="tokens packed into one forward; less saves memory (verl ppo_max_token_len_per_gpu)",
    )
    share_prompts: bool = Field(
        False,
        description="compute a prompt once for all its responses in a micro-batch, not once for each; for long "
        "prompts; not with context parallelism",
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none", description="activations recomputed in the backward pass to save memory (gradient checkpointing)"
    )
    fp8_format: Literal["e4m3", "hybrid"] | None = Field(
        None,
        description="FP8 of the products of linear layers, forwards and backwards (Megatron --fp8-format); hybrid: of "
        "gradients e5m2. Weights, optimizer, checkpoints and the sync stay as they are, so do embedding, head, "
        "routers, norms and attention itself. It has not run on a GPU yet; null: model.dtype",
    )
    fp8_recipe: Literal["blockwise", "tensorwise", "mxfp8"] = Field(
        "blockwise",
        description="factors of training.fp8_format (Megatron --fp8-recipe). blockwise: DeepSeek-V3's, for Hopper "
        "GPUs, and computed on a CPU, too; tensorwise: one a tensor; mxfp8: for Blackwell GPUs",
    )
    router_replay: Literal["none", "R2", "R3"] = Field(
        "none",
        description="experts that routers take in the training passes (verl router_replay, Megatron "
        "moe_enable_routing_replay). R3: those that the engine chose, also in the old-logprob pass (slime "
        "--use-rollout-routing-replay); R2: those of the old-logprob pass (slime --use-routing-replay); none: their "
        "own. Never those of the reference",
    )
    logprob_chunk_tokens: int = Field(
        1024, gt=0, description="tokens whose logits are computed at a time; lower it if memory is short"
    )
    megatron_args: dict[str, Any] = Field(
        {}, description="any field of Megatron's transformer, optimizer and data-parallel configs, checked by name"
    )


class SyncConfig(Section):
    """Weights from the trainer to the engines after each step."""

    transport: Literal["auto", "host", "ipc"] = Field(
        "auto", description="host: shared host memory; ipc: CUDA IPC; auto: ipc on GPUs"
    )
    bucket_bytes: int | None = Field(
        None,
        gt=0,
        description="memory of a rank for weights on their way, of which a quarter is one round of the sync; at least "
        "four times the largest tensor, in most models the embedding, which an engine loads at once. More makes fewer "
        "rounds. null: 1 GiB, or the least",
    )
    pause: PauseMode = Field(
        "retract",
        description="how running requests wait for new weights with schedule=async. retract: their cache is computed "
        "anew by the new weights; in_place: they keep it, and those that wait for a place in the engine may read it. "
        "Requests that come later read none of it",
    )
    check_tolerance: float | None = Field(
        None,
        gt=0,
        description="allowed mean absolute logprob difference of engine and policy after a sync, in nats; null: 1.5 "
        "times what noise of one rounding at every linear layer changes in the policy's own logprobs on the same "
        "tokens, and at least 1e-4",
    )

    _parse_unit = field_validator("bucket_bytes", mode="before")(as_bytes)
