"""Base classes for sections of the settings and iteration over nested sections."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from grpo_mp.utils.errors import read_number
from grpo_mp.utils.user_code import PYTHON_FILE

VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)")
BEGINS_AS_PATH = re.compile(r"(~\w*|\$\w+|\$\{\w+\})/")


def expand_path(value: Any) -> Any:
    """Expand ~ and environment variables in a path; return values that are not text unchanged."""
    if not isinstance(value, str):
        return value
    path = os.path.expandvars(os.path.expanduser(value))
    if unset := VARIABLE.search(path):
        raise ValueError(f"the environment variable {unset[1]} in {value[:100]!r} is not set: set it")
    return path


PathText = Annotated[str, BeforeValidator(expand_path)]  # a path, or for data sets also a name on the hub


class Section(BaseModel):
    """A frozen section of the settings that refuses unknown names, infinity and NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _expand_paths(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[info.field_name or ""].annotation
        kinds = set(_types_in(annotation))
        if section_type(annotation):
            return value  # nested sections check their own values
        if isinstance(value, bool) and not kinds & {bool, Any} and kinds & {int, float}:
            raise ValueError(f"expected a number, found {str(value).lower()}")
        return _mapped(value, lambda item: expand_path(item) if _is_path(item, kinds) else item)


class ServedModelConfig(Section):
    """A model behind SGLang with the policy's tokenizer: a server, or a folder that the job itself serves."""

    path: PathText = Field(
        min_length=1,
        description="URL of an SGLang server, http://HOST:PORT, or a folder that the job serves on its own devices, "
        "with schedule=colocated",
    )
    args: dict[str, Any] = Field(
        {}, description="any argument of SGLang for the folder's servers; each takes tp_size ranks of a node"
    )
    api_key_env: str | None = Field(
        None, description="environment variable that holds the server's API key; null: none"
    )

    @property
    def url(self) -> str:
        return self.path if self.path.startswith(("http://", "https://")) else ""

    @property
    def folder(self) -> Path | None:
        return None if self.url else Path(self.path)

    @property
    def gpus_per_server(self) -> int:
        return read_number(int, self.args.get("tp_size", 1), "tp_size")


def _types_in(annotation: Any) -> Iterator[Any]:
    yield annotation
    for inner in get_args(annotation):
        yield from _types_in(inner)


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        return {function(name): _mapped(item, function) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_mapped(item, function) for item in value)
    return function(value)


def _is_path(value: Any, kinds: set[Any]) -> bool:
    if not isinstance(value, str):
        return False
    return Path in kinds or bool(PYTHON_FILE.fullmatch(value)) or (Any in kinds and bool(BEGINS_AS_PATH.match(value)))


def section_type(annotation: Any) -> type[Section] | None:
    """Return the Section subclass X of an annotation `X`, `X | None` or `dict[str, X]`, or None."""
    types = [item for item in (annotation, *get_args(annotation)) if isinstance(item, type)]
    return next((item for item in types if issubclass(item, Section)), None)


def nested_sections(section: type[Section], path: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Yield (dotted name, class) of a section and of all sections below it. NAME stands for a key of a dict."""
    yield path, section
    for name, field in section.model_fields.items():
        nested = section_type(field.annotation)
        if nested:
            chosen = ".NAME" if get_origin(field.annotation) is dict else ""
            yield from nested_sections(nested, f"{path}.{name}{chosen}".removeprefix("."))
