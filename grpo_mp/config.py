"""Settings: read a YAML file and `section.key=value` overrides into frozen typed settings.

Numbers may be written 1e-6 (text to YAML 1.1): pydantic reads numeric text as a number.
Every section refuses unknown names and suggests the nearest known one. Units are part of the names.
"""

import sys
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from grpo_mp.algorithms.presets import with_preset
from grpo_mp.algorithms.registries import needs_right
from grpo_mp.algorithms.settings import Algorithm
from grpo_mp.errors import USER_STATUS, UserError, nearest
from grpo_mp.evaluation.pass_at_k import MOST_SAMPLES
from grpo_mp.rewards.settings import Reward
from grpo_mp.section import Section, as_bytes


class RunConfig(Section):
    folder: Path
    seed: int = 0
    steps: int = Field(gt=0)
    save_every: int = Field(20, ge=0, description="steps; 0 saves only at the end")
    eval_every: int = Field(20, ge=0, description="steps; 0 evaluates only before and after")
    keep_checkpoints: int = Field(2, ge=1)
    resume: Literal["auto", "never"] = "auto"
    export: bool = Field(True, description="write a Hugging Face folder at the end")


class ModelConfig(Section):
    path: Path = Field(description="a Hugging Face folder; the architecture comes from its config.json")
    family: str | None = Field(
        None, description="a built-in family's name or 'file.py:FAMILY'; null: by model_type of config.json"
    )
    dtype: Literal["float32", "bfloat16"] = "bfloat16"


class Layout(Section):
    tensor: int = Field(1, ge=1)
    pipeline: int = Field(1, ge=1)
    virtual_pipeline: int | None = Field(None, ge=2, description="model chunks per pipeline stage")
    context: int = Field(1, ge=1)
    expert: int = Field(1, ge=1)
    expert_tensor: int = Field(1, ge=1)


class EvalSet(Section):
    """A held-out set, and how its answers are sampled; null: as in the rollout."""

    path: str = Field(description="JSONL or Parquet file, or a `datasets` name, `name:split`")
    samples: int = Field(
        1, ge=1, le=MOST_SAMPLES, description="responses to each problem: avg@n, pass@k and maj@k up to n"
    )
    temperature: float | None = Field(None, ge=0, description="0: the likeliest token")
    top_p: float | None = Field(None, gt=0, le=1)
    max_response_tokens: int | None = Field(None, gt=0)
    prompts: int | None = Field(None, gt=0, description="the first that many; null: data.eval_prompts")
    source: str | None = Field(None, description="what reads `path`; null: as data.source")

    @model_validator(mode="after")
    def _check_samples_can_differ(self) -> "EvalSet":
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(
                f"at temperature 0 the {self.samples} samples of a problem are all the same: set samples=1"
            )
        return self


class Data(Section):
    train: str = Field(description="JSONL or Parquet file, or a `datasets` name, `name:split`")
    eval: dict[str, EvalSet] = Field({}, description="name to file or `datasets` name, or to {path, samples, ...}")
    source: str | None = Field(
        None,
        description="what reads `train` and `eval`: jsonl, parquet, datasets, or your own 'file.py:function', which is "
        "called with their text; null: by the file's suffix",
    )
    prompt: str = "question"
    answer: str | None = "answer"
    system: str | None = None
    shuffle: bool = True
    eval_prompts: int | None = Field(None, gt=0, description="prompts of each eval set; null: all")

    @field_validator("eval", mode="before")
    @classmethod
    def _expand_path(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: {"path": item} if isinstance(item, str) else item for name, item in value.items()}


class RolloutConfig(Section):
    prompts_per_step: int = Field(gt=0)
    group_size: int = Field(gt=0)
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


class Optimizer(Section):
    lr: float = Field(gt=0)
    min_lr: float = Field(0.0, ge=0)
    warmup_updates: int = Field(0, ge=0)
    decay: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = Field(1e-8, gt=0)
    clip_grad: float = Field(1.0, ge=0, description="norm of the whole gradient; 0 does not clip")
    updates_per_step: int = Field(1, ge=1, description="parts of a step's samples, each one optimizer update")
    epochs: int = Field(1, ge=1, description="passes over a step's samples: mu of GRPO, TRL's num_iterations")
    shuffle: bool = Field(False, description="samples go to the step's updates at random; false: whole groups in order")
    max_tokens_per_microbatch: int = Field(4096, gt=0)
    share_prompts: bool = Field(
        False, description="compute a prompt once for all its responses in a micro-batch, not once for each"
    )
    recompute: Literal["none", "selective", "full"] = "none"
    logprob_chunk_tokens: int = Field(1024, gt=0, description="tokens whose logits exist at one time")
    megatron: dict[str, Any] = Field({}, description="any field of Megatron's configs, checked by name")


class Sync(Section):
    transport: Literal["auto", "host", "ipc"] = "auto"
    bucket_bytes: int = Field(2**30, gt=0)
    check_tolerance: float | None = Field(None, gt=0, description="nats between engine and policy; null: by dtype")
    timeout_s: float = Field(600.0, gt=0)

    _parse_unit = field_validator("bucket_bytes", mode="before")(as_bytes)


class Monitor(Section):
    loggers: dict[str, dict[str, Any]] = Field(
        {"tensorboard": {}, "jsonl": {}},
        description="what writes the metrics, by name or 'file.py:Class', each with its arguments; or a list of them",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="of RUN/logs/rank_N.log; warnings go to the terminal, too"
    )
    samples_per_step: int = Field(4, ge=0, description="sample texts written at each step")
    phase_timeout_s: float = Field(
        3600.0, gt=0, description="the longest that a phase may take and a rank may wait for the others"
    )

    @field_validator("loggers", mode="before")
    @classmethod
    def _loggers_from_list(cls, value: Any) -> Any:
        return {name: {} for name in value} if isinstance(value, list) else value


class Settings(Section):
    run: RunConfig
    model: ModelConfig
    layout: Layout = Layout()
    data: Data
    rollout: RolloutConfig
    engine: Engine = Engine()
    reward: Reward
    algorithm: Algorithm = Algorithm()
    optimizer: Optimizer
    sync: Sync = Sync()
    monitor: Monitor = Monitor()

    @model_validator(mode="after")
    def _check_updates_divide_samples(self) -> "Settings":
        samples, updates = self.samples_per_step, self.optimizer.updates_per_step
        if samples % updates:
            raise ValueError(
                f"optimizer.updates_per_step={updates} does not divide the {samples} samples of a step "
                "(rollout.prompts_per_step x rollout.group_size)"
            )
        return self

    @model_validator(mode="after")
    def _check_prompts_can_be_shared(self) -> "Settings":
        if self.optimizer.share_prompts and self.layout.context > 1:
            raise ValueError(
                f"optimizer.share_prompts needs sequences that are whole on a rank, and layout.context="
                f"{self.layout.context} cuts them: set share_prompts=false, or layout.context=1"
            )
        return self

    @model_validator(mode="after")
    def _check_timeouts(self) -> "Settings":
        """Check that an inner wait ends before the outer one, because its error says more."""
        request, phase = "engine.request_timeout_s", "monitor.phase_timeout_s"
        limits = {
            "rollout.group_timeout_s": self.rollout.group_timeout_s,
            "reward.timeout_s": self.reward.timeout_s,
            "sync.timeout_s": self.sync.timeout_s,
            "engine.start_timeout_s": self.engine.start_timeout_s,
            request: self.engine.request_timeout_s,
            phase: self.monitor.phase_timeout_s,
        }
        for outer, inner in ((request, "rollout.group_timeout_s"), *((phase, name) for name in limits)):
            if limits[outer] < limits[inner]:
                raise ValueError(
                    f"{outer}={limits[outer]:g} is shorter than {inner}={limits[inner]:g}, a wait inside it: "
                    f"raise it to {limits[inner]:g} or more"
                )
        return self

    @model_validator(mode="after")
    def _check_group_size(self) -> "Settings":
        if self.rollout.group_size == 1 and self.algorithm.advantage.baseline != "none":
            raise ValueError(
                f"rollout.group_size=1 leaves algorithm.advantage.baseline={self.algorithm.advantage.baseline} nothing "
                "to compare with: set 2 or more, or algorithm: reinforce_pp"
            )
        return self

    @model_validator(mode="after")
    def _check_right_is_known(self) -> "Settings":
        if self.algorithm.filter.rest_after and self.reward.correctness_rule is None:
            raise ValueError(
                "algorithm.filter.rest_after rests prompts that are answered right, and nothing says what right means: "
                "set reward.right to the part that does, or rest_after=0"
            )
        rule = self.algorithm.filter
        if rule.no_difference != "keep" and needs_right(rule.metric) and self.reward.correctness_rule is None:
            raise ValueError(
                f"algorithm.filter.metric={rule.metric} drops groups that are all right or all wrong, and nothing says "
                "what right means: set reward.right to the part that does, or metric=reward"
            )
        return self

    @model_validator(mode="after")
    def _check_overlong_buffer(self) -> "Settings":
        overlong, limit = self.reward.overlong, self.rollout.max_response_tokens
        if overlong.weight and overlong.buffer_tokens is not None and overlong.buffer_tokens >= limit:
            raise ValueError(
                f"reward.overlong.buffer_tokens={overlong.buffer_tokens} is not below "
                f"rollout.max_response_tokens={limit}: lower it"
            )
        return self

    @model_validator(mode="after")
    def _check_step_rewards(self) -> "Settings":
        process = self.algorithm.advantage.level == "process"
        if process and not self.reward.steps:
            raise ValueError("advantage.level=process has no step rewards: set reward.steps, or level=outcome")
        if not process and self.reward.steps and not self.reward.has_outcome:
            raise ValueError(
                "reward.steps alone rewards no whole response: set algorithm=grpo_process, or reward.answer"
            )
        return self

    @property
    def samples_per_step(self) -> int:
        """Return the samples of one step."""
        return self.rollout.prompts_per_step * self.rollout.group_size

    @property
    def optimizer_steps_per_step(self) -> int:
        """Return the optimizer updates of one step: its parts times the epochs over them."""
        return self.optimizer.updates_per_step * self.optimizer.epochs

    def eval_set(self, name: str) -> EvalSet:
        """Return a held-out set with its sampling settings; the rollout's where it has none of its own."""
        eval_set, rollout = self.data.eval[name], self.rollout
        return eval_set.model_copy(
            update={
                "temperature": rollout.temperature if eval_set.temperature is None else eval_set.temperature,
                "top_p": eval_set.top_p or rollout.top_p,
                "max_response_tokens": eval_set.max_response_tokens or rollout.max_response_tokens,
                "prompts": eval_set.prompts or self.data.eval_prompts,
            }
        )

    @property
    def longest_response(self) -> int:
        """Return the tokens of the longest response that is sampled, in a step or in an evaluation."""
        limits = (self.eval_set(name).max_response_tokens for name in self.data.eval)
        return max(filter(None, [self.rollout.max_response_tokens, *limits]))


def load_settings(path: Path, overrides: list[str] | None = None) -> Settings:
    """Read a YAML file, apply `section.key=value` overrides, and check every name and value.

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
        _apply_override(tree, override)
    return check_settings(tree, str(path))


def check_settings(tree: dict[str, Any], where: str) -> Settings:
    """Validate a plain dictionary. Raises UserError with a sentence for each invalid setting."""
    try:
        return Settings.model_validate(with_preset(tree))
    except ValidationError as error:
        raise UserError("; ".join(_format_error(where, item) for item in error.errors())) from error


def dump_settings(settings: Settings) -> str:
    """Return every setting with its value as YAML, which `load_settings` reads back equal."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False)


def _apply_override(tree: dict[str, Any], override: str) -> None:
    name, equals, value = override.partition("=")
    if not equals or ("." not in name and name not in Settings.model_fields):
        raise UserError(f"override {override!r}: write section.key=value, e.g. rollout.group_size=16")
    *sections, key = name.split(".")
    for depth, section in enumerate(sections):
        if not isinstance(tree.get(section), dict):
            tree[section] = _expand_shorthand(sections[:depth], section, tree.get(section))
        tree = tree[section]
    try:
        tree[key] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise UserError(f"override {override!r}: the value is not valid YAML") from error


def _expand_shorthand(parents: list[str], section: str, value: Any) -> dict[str, Any]:
    """Return the mapping for a section that was given as a single value, or not at all."""
    if section == "algorithm" and value is not None:
        return {"preset": value}
    return {"path": value} if parents == ["data", "eval"] and isinstance(value, str) else {}


def _format_error(where: str, item: Any) -> str:
    name = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"{where}: unknown setting {name}{_suggest_setting(item['loc'])}"
    if item["type"] == "missing":
        return f"{where}: setting {name} is missing"
    message = item["msg"].removeprefix("Value error, ")
    return f"{where}: {name}: {message}" if name else f"{where}: {message}"


def _suggest_setting(location: tuple[Any, ...]) -> str:
    section: type[Section] | None = Settings
    parts = iter(location[:-1])
    for part in parts:
        field = section.model_fields.get(part) if section else None
        section = _section_type(field.annotation) if field else None
        if field and get_origin(field.annotation) is dict:
            next(parts, None)  # a name that the user chose
    if section is None:
        return ""
    prefix = ".".join(str(part) for part in location[:-1])
    hint = nearest(str(location[-1]), section.model_fields)
    return hint.replace("mean ", f"mean {prefix}.") if prefix else hint


def _section_type(annotation: Any) -> type[Section] | None:
    """Return the section type in an annotation `X` or `X | None`."""
    types = [item for item in (annotation, *get_args(annotation)) if isinstance(item, type)]
    return next((item for item in types if issubclass(item, Section)), None)


def exit_with(error: UserError) -> NoReturn:
    """Exit with status 2 and the error's sentence on stderr."""
    sys.stderr.write(f"error: {error}\n")
    raise SystemExit(USER_STATUS)
