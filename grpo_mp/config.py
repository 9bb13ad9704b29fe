"""Settings: one YAML file and `section.key=value` overrides in, frozen typed settings out.

Numbers may be written 1e-6 (text to YAML 1.1): pydantic reads numeric text as a number.
Every section refuses unknown names and says which known one is nearest. Units stand in the names.
"""

import sys
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from grpo_mp.errors import USER_STATUS, UserError, nearest

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def parse_bytes(text: str) -> int:
    """'512MiB' -> 536870912. Raises ValueError for another unit."""
    for unit, size in UNITS.items():
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * size)
    if text.isdigit():
        return int(text)
    raise ValueError(f"{text!r} is not a number of bytes: write 512MiB, 1GiB or a plain number")


def _bytes(value: Any) -> Any:
    return parse_bytes(value) if isinstance(value, str) else value


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Run(Section):
    folder: Path
    seed: int = 0
    steps: int = Field(gt=0)
    save_every: int = Field(20, ge=0, description="steps; 0 saves only at the end")
    eval_every: int = Field(20, ge=0, description="steps; 0 evaluates only before and after")
    keep_checkpoints: int = Field(2, ge=1)
    resume: Literal["auto", "never"] = "auto"
    export: bool = Field(True, description="write a Hugging Face folder at the end")


class Model(Section):
    path: Path = Field(description="a Hugging Face folder; the architecture comes from its config.json")
    dtype: Literal["float32", "bfloat16"] = "bfloat16"


class Layout(Section):
    tensor: int = Field(1, ge=1)
    pipeline: int = Field(1, ge=1)
    virtual_pipeline: int | None = Field(None, ge=2, description="model chunks per pipeline stage")
    context: int = Field(1, ge=1)
    expert: int = Field(1, ge=1)
    expert_tensor: int = Field(1, ge=1)


class Data(Section):
    train: str = Field(description="JSONL or Parquet file, or a `datasets` name, `name:split`")
    eval: dict[str, str] = {}
    prompt: str = "question"
    answer: str | None = "answer"
    system: str | None = None
    shuffle: bool = True
    eval_prompts: int | None = Field(None, gt=0, description="prompts of each eval set; null: all")


class Rollout(Section):
    prompts_per_step: int = Field(gt=0)
    group_size: int = Field(gt=1)
    max_prompt_tokens: int = Field(gt=0)
    max_response_tokens: int = Field(gt=0)
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    stop: tuple[str, ...] = ()
    group_timeout_s: float = Field(600.0, gt=0)


class Engine(Section):
    gpus: int = Field(1, ge=1, description="consecutive ranks that one engine spans")
    count: int | None = Field(None, ge=1, description="engines; null: as many as fit the ranks")
    start_timeout_s: float = Field(600.0, gt=0)
    request_timeout_s: float = Field(600.0, gt=0)
    concurrent_groups: int = Field(64, gt=0, description="groups in flight on one engine")
    args: dict[str, Any] = Field({}, description="any argument of the installed SGLang, checked by name")


class Overlong(Section):
    weight: float = Field(0.0, ge=0, description="0: off")
    buffer_tokens: int = Field(4096, gt=0, description="the last tokens before max_response_tokens, L_cache of DAPO")


class Repetition(Section):
    weight: float = Field(0.0, ge=0, description="0: off")
    ngram: int = Field(4, gt=0, description="tokens")


class RewardModel(Section):
    url: str = Field(pattern="^https?://", description="an SGLang server with a reward head and the policy's tokenizer")
    weight: float = 1.0
    timeout_s: float = Field(30.0, gt=0, description="limit of one call for one group")
    retries: int = Field(2, ge=0, description="after no answer, or a status of 429 or 500 and above")


class Code(Section):
    weight: float = 1.0
    tests: str = Field("tests", description="data column: asserts, a list of them, or a list of {input, output}")
    partial: bool = Field(False, description="the share of passed tests; false: 1 if all pass, else 0")
    isolation: Literal["required", "best_effort"] = Field(
        "required", description="refuse, or run with limits only, where the kernel gives no namespaces"
    )
    parallel: int = Field(4, gt=0, description="programs that run at one time on one rank")
    timeout_s: float = Field(5.0, gt=0, description="limit for all tests of one response")
    memory_bytes: int = Field(512 * 2**20, gt=0, description="address space of each process of a program")
    output_bytes: int = Field(2**20, gt=0, description="the largest file a program may write, its output included")
    processes: int = Field(16, gt=0, description="processes and threads of one program")

    _unit = field_validator("memory_bytes", "output_bytes", mode="before")(_bytes)


class Reward(Section):
    answer: float = 0.0
    boxed: float = 0.0
    length: float = Field(0.0, description="weight of min(1, tokens / max_response_tokens); negative punishes length")
    overlong: Overlong = Overlong()
    repetition: Repetition = Repetition()
    model: RewardModel | None = None
    code: Code | None = None
    functions: dict[str, float] = Field({}, description="'module:function' or 'file.py:function' to its weight")
    steps: str | None = Field(None, description="'module:function' or 'file.py:function' that rewards single steps")
    timeout_s: float = Field(30.0, gt=0)
    on_error: Literal["stop"] | float = Field("stop", description="or the reward that a failing call scores")

    @model_validator(mode="after")
    def _some_reward(self) -> "Reward":
        sections = (self.overlong, self.repetition, self.model, self.code)
        weights = [self.answer, self.boxed, self.length, *(one.weight for one in sections if one)]
        if not (any(weights) or self.functions or self.steps):
            raise ValueError("no reward has a weight: set reward.answer, reward.boxed or reward.functions")
        return self


class KL(Section):
    weight: float = Field(0.0, ge=0)
    estimator: Literal["k3"] = "k3"


class Advantage(Section):
    normalise_std: bool = True
    eps: float = Field(1e-4, gt=0)


class Clip(Section):
    low: float = Field(0.2, gt=0)
    high: float = Field(0.2, gt=0)


class Algorithm(Section):
    preset: Literal["grpo"] = "grpo"
    kl: KL = KL()
    advantage: Advantage = Advantage()
    clip: Clip = Clip()
    aggregation: Literal["sequence_mean", "token_mean"] = "sequence_mean"


class Optimizer(Section):
    lr: float = Field(gt=0)
    min_lr: float = Field(0.0, ge=0)
    warmup_updates: int = Field(0, ge=0)
    decay: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = Field(1e-8, gt=0)
    clip_grad: float = Field(1.0, ge=0, description="norm of the whole gradient; 0 does not clip")
    updates_per_step: int = Field(1, ge=1)
    max_tokens_per_microbatch: int = Field(4096, gt=0)
    recompute: Literal["none", "selective", "full"] = "none"
    logprob_chunk_tokens: int = Field(1024, gt=0, description="tokens whose logits exist at one time")
    megatron: dict[str, Any] = Field({}, description="any field of Megatron's configs, checked by name")


class Sync(Section):
    transport: Literal["auto", "host", "ipc"] = "auto"
    bucket_bytes: int = Field(2**30, gt=0)
    check_tolerance: float | None = Field(None, gt=0, description="nats between engine and policy; null: by dtype")
    timeout_s: float = Field(600.0, gt=0)

    _unit = field_validator("bucket_bytes", mode="before")(_bytes)


class Monitor(Section):
    samples_per_step: int = Field(4, ge=0, description="sample texts written at each step")
    phase_timeout_s: float = Field(3600.0, gt=0, description="the longest that a rank may wait for the others")


class Settings(Section):
    run: Run
    model: Model
    layout: Layout = Layout()
    data: Data
    rollout: Rollout
    engine: Engine = Engine()
    reward: Reward
    algorithm: Algorithm = Algorithm()
    optimizer: Optimizer
    sync: Sync = Sync()
    monitor: Monitor = Monitor()

    @model_validator(mode="after")
    def _updates_divide_samples(self) -> "Settings":
        samples, updates = self.samples_per_step, self.optimizer.updates_per_step
        if samples % updates:
            raise ValueError(
                f"optimizer.updates_per_step={updates} does not divide the {samples} samples of a step "
                "(rollout.prompts_per_step x rollout.group_size)"
            )
        return self

    @model_validator(mode="after")
    def _buffer_inside_response(self) -> "Settings":
        overlong, limit = self.reward.overlong, self.rollout.max_response_tokens
        if overlong.weight and overlong.buffer_tokens >= limit:
            raise ValueError(
                f"reward.overlong.buffer_tokens={overlong.buffer_tokens} is not below "
                f"rollout.max_response_tokens={limit}: lower it"
            )
        return self

    @property
    def samples_per_step(self) -> int:
        return self.rollout.prompts_per_step * self.rollout.group_size


def load_settings(path: Path, overrides: list[str] | None = None) -> Settings:
    """Read a YAML file, lay `section.key=value` overrides over it, and check every name and value.

    Raises UserError: file missing, not YAML, unknown setting (with the nearest known), bad value.
    """
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: give an existing settings file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected sections (run:, model:, ...), found {type(tree).__name__}")
    for override in overrides or []:
        _lay_over(tree, override)
    return check_settings(tree, str(path))


def check_settings(tree: dict[str, Any], where: str) -> Settings:
    """Validate a plain dictionary; raises UserError with all complaints in one sentence each."""
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        raise UserError("; ".join(_sentence(where, item) for item in error.errors())) from error


def dump_settings(settings: Settings) -> str:
    """The resolved file: every setting with its value, as YAML that `load_settings` reads back equal."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False)


def _lay_over(tree: dict[str, Any], override: str) -> None:
    name, equals, value = override.partition("=")
    if not equals or "." not in name:
        raise UserError(f"override {override!r}: write section.key=value, e.g. rollout.group_size=16")
    *sections, key = name.split(".")
    for section in sections:
        if not isinstance(tree.get(section), dict):
            tree[section] = {}
        tree = tree[section]
    try:
        tree[key] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise UserError(f"override {override!r}: the value is not valid YAML") from error


def _sentence(where: str, item: Any) -> str:
    name = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"{where}: unknown setting {name}{_nearest_setting(item['loc'])}"
    if item["type"] == "missing":
        return f"{where}: setting {name} is missing"
    message = item["msg"].removeprefix("Value error, ")
    return f"{where}: {name}: {message}" if name else f"{where}: {message}"


def _nearest_setting(location: tuple[Any, ...]) -> str:
    section: type[Section] | None = Settings
    for part in location[:-1]:
        field = section.model_fields.get(part) if section else None
        section = _section_of(field.annotation) if field else None
    if section is None:
        return ""
    prefix = ".".join(str(part) for part in location[:-1])
    hint = nearest(str(location[-1]), section.model_fields)
    return hint.replace("mean ", f"mean {prefix}.") if prefix else hint


def _section_of(annotation: Any) -> type[Section] | None:
    """The section that an annotation `X` or `X | None` names."""
    kinds = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
    return next((kind for kind in kinds if issubclass(kind, Section)), None)


def exit_with(error: UserError) -> NoReturn:
    """End the process as a user's mistake ends: one sentence on stderr, status 2."""
    sys.stderr.write(f"error: {error}\n")
    raise SystemExit(USER_STATUS)
