"""Read a YAML file and `section.key=value` overrides into frozen typed settings.

Unknown names are rejected with a suggestion. Numbers such as 1e-6, which YAML 1.1 reads as text, are converted by
pydantic.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar, get_origin

import yaml
from pydantic import ValidationError

from grpo_mp.algorithms.presets import with_preset
from grpo_mp.config.other_trainers import translate
from grpo_mp.config.pipeline_settings import PipelineSettings
from grpo_mp.config.sections import DEFAULT_DTYPE
from grpo_mp.config.settings import Settings
from grpo_mp.config.sft_settings import SftSettings
from grpo_mp.utils.errors import UserError, did_you_mean
from grpo_mp.utils.reading import parse_override, read_yaml, shorten
from grpo_mp.utils.redact import without_secrets
from grpo_mp.utils.section import Section, section_type

SETS = (["data", "train"], ["data", "eval"])  # settings that map names to data sets

SFT = "sft"  # section that identifies settings of supervised fine-tuning
STAGES = "stages"  # section that identifies settings of a pipeline
Root = TypeVar("Root", bound=Section)

EXPECTED = {  # noun for messages, by error type of pydantic
    **dict.fromkeys(("model_type", "dict_type"), "settings below it, as {name}.KEY=VALUE"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "an integer"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("string_type", "path_type"), "text"),
    "tuple_type": "a list",
}


def load_settings(
    path: Path, overrides: list[str] | None = None, trains: bool = True, dtype: str = DEFAULT_DTYPE
) -> Settings:
    """Read the settings of an RL run, apply `section.key=value` overrides, and check every name and value.

    `trains`: also check requirements of training, which evaluation and sampling do not have. `dtype`: default of
    model.dtype on this machine.
    """
    tree = _with_dtype(_read_tree(path, overrides or []), dtype)
    if SFT in tree:
        raise UserError(f"{path}: these are settings of supervised fine-tuning (section sft): run `grpo-mp sft`")
    if STAGES in tree:
        raise UserError(f"{path}: these are settings of a pipeline (section stages): run `grpo-mp pipeline`")
    return check_settings(tree, str(path), trains)


def load_sft_settings(path: Path, overrides: list[str] | None = None, dtype: str = DEFAULT_DTYPE) -> SftSettings:
    """Read the settings of a run of supervised fine-tuning, see `load_settings`."""
    return _check(SftSettings, _with_dtype(_read_tree(path, overrides or []), dtype), str(path))


def load_any_settings(path: Path, overrides: list[str] | None = None) -> Settings | SftSettings:
    """Read the settings of a run of RL or, if the file has a section `sft`, of supervised fine-tuning."""
    tree = _read_tree(path, overrides or [])
    return _check(SftSettings, tree, str(path)) if SFT in tree else check_settings(tree, str(path))


def load_pipeline(path: Path, overrides: list[str] | None = None) -> PipelineSettings:
    """Read the settings of a pipeline. `overrides`: replace top-level keys, such as folder=runs/r1."""
    tree = _read_tree(path, [])
    for override in overrides or []:
        key, equals, value = override.partition("=")
        if not equals:
            raise UserError(f"override {shorten(override)!r}: write key=value, e.g. folder=runs/r1")
        tree[key] = parse_override(value, f"override {shorten(override)!r}")
    return _check(PipelineSettings, tree, str(path))


def is_pipeline(path: Path) -> bool:
    """Return whether a settings file describes a pipeline."""
    return STAGES in _read_tree(path, [])


def training_module(path: Path) -> str:
    """Return the module to run for a settings file: grpo_mp.sft or grpo_mp.train."""
    return "grpo_mp.sft" if SFT in _read_tree(path, []) else "grpo_mp.train"


def _read_tree(path: Path, overrides: list[str]) -> dict[str, Any]:
    tree = read_yaml(path)
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected sections (run:, model:, ...), found {type(tree).__name__}")
    for override in overrides:
        _apply_override(tree, override)
    return tree


def _with_dtype(tree: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Set model.dtype to `dtype` if it is null or missing."""
    model = tree.get("model")
    if isinstance(model, dict) and model.get("dtype") is None:
        return tree | {"model": model | {"dtype": dtype}}
    return tree


def check_settings(tree: dict[str, Any], where: str, trains: bool = True) -> Settings:
    """Validate nested dicts as settings of RL. `where`: file name for messages. `trains`: see `load_settings`."""
    settings = _check(Settings, tree, where)
    if trains and settings.group_size_problem:
        raise UserError(f"{where}: {settings.group_size_problem}")
    return settings


def check_sft_settings(tree: dict[str, Any], where: str) -> SftSettings:
    """Validate nested dicts as settings of supervised fine-tuning. `where`: file name for messages."""
    return _check(SftSettings, tree, where)


def _check(root: type[Root], tree: dict[str, Any], where: str) -> Root:
    try:
        return root.model_validate(with_preset(tree) if root is Settings else tree)
    except ValidationError as error:
        raise UserError("; ".join(_format_error(root, where, item) for item in error.errors())) from error


def dump_settings(settings: Section) -> str:
    """Return all settings as YAML, which `load_any_settings` reads back without loss."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False)


def show_settings(settings: Section, every: bool = True) -> str:
    """Return all settings, or those that differ from their defaults, as YAML for display, with secrets removed."""
    shown = without_secrets(settings.model_dump(mode="json", exclude_defaults=not every))
    header = "" if every else "# settings that differ from the defaults (--all shows every one)\n"
    return header + yaml.safe_dump(shown, sort_keys=False)


def _apply_override(tree: dict[str, Any], override: str) -> None:
    name, equals, value = override.partition("=")
    if not equals or ("." not in name and name not in Settings.model_fields):
        raise UserError(f"override {shorten(override)!r}: write section.key=value, e.g. rollout.group_size=16")
    *sections, key = name.split(".")
    for depth, section in enumerate(sections):
        if not isinstance(tree.get(section), dict):
            tree[section] = _expand_shorthand(sections[:depth], section, tree.get(section))
        tree = tree[section]
    tree[key] = parse_override(value, f"override {shorten(override)!r}")


def _expand_shorthand(parents: list[str], section: str, value: Any) -> dict[str, Any]:
    """Return the dict for a section that the file gives as a single value (a shorthand) or leaves out."""
    if section == "algorithm" and value is not None:
        return {"preset": value}
    if not isinstance(value, str):
        return {}
    return {"train": value} if [*parents, section] == ["data", "train"] else {"path": value} if parents in SETS else {}


def _format_error(root: type[Section], where: str, item: Any) -> str:
    section, names = _locate(root, item["loc"])
    name = shorten(".".join(names), 300)
    if item["type"] == "extra_forbidden":
        foreign = dict.fromkeys(filter(None, map(translate, _written_names(name, item["input"]))))
        if foreign:
            return f"{where}: unknown setting {name}: {'; '.join(foreign)}"
        hint = did_you_mean(names[-1], section.model_fields) if section else ""
        return f"{where}: unknown setting {name}{hint.replace('mean ', f'mean {name[: -len(names[-1])]}')}"
    if item["type"] == "missing":
        return f"{where}: setting {name} is missing"
    expected = EXPECTED.get(item["type"], "")
    shown = f"expected {expected.format(name=name)}, found {shorten(repr(item['input']))}"
    message = shown if expected else item["msg"].removeprefix("Value error, ")
    return f"{where}: {name}: {message}" if name else f"{where}: {message}"


def _locate(root: type[Section], location: tuple[Any, ...]) -> tuple[type[Section] | None, list[str]]:
    """Return the section class that a location of a pydantic error lies in, or None, and the location as names."""
    section: type[Section] | None = root
    names = [str(part) for part in location]
    parts = iter(names[:-1])
    for part in parts:
        field = section.model_fields.get(part) if section else None
        section = section_type(field.annotation) if field else None
        if field and get_origin(field.annotation) is dict:
            next(parts, None)  # skip the key of the dict, which the user chose
    return section, [name for name in names if name]  # the key of a teacher of all sets is empty


def _written_names(name: str, value: Any) -> Iterator[str]:
    """Yield the dotted names of a setting and of all settings that the user wrote below it."""
    yield name
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _written_names(f"{name}.{key}", inner)
