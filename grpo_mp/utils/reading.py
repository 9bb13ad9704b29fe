"""Read what others wrote: text, YAML, JSON. Whatever is wrong with a file is one sentence that names it."""

import errno
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from grpo_mp.utils.errors import UserError, did_you_mean, one_line

YAML_BYTES = 2**18
TEXT_BYTES = 2**28  # an index of every tensor of the largest model has a hundredth of it
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)
MISSING = object()  # what a row does not have
TAG = "tag:yaml.org,2002:"
YAML_MARKS = "'\"|>&!"  # begin text that is quoted, a block, an anchor or a tag
# Not those of YAML 1.1, by which 1:30 is 90, 010 is 8, and 2024-01-01 a date: they are text.
NUMBERS = {
    f"{TAG}int": re.compile(r"[-+]?(?:0|[1-9][0-9_]*)$|0x[0-9a-fA-F]+$"),
    f"{TAG}float": re.compile(
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+][0-9]+)?$|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
    ),
}


@contextmanager
def refuse_unreadable(what: Path | str, missing: str = "give an existing file") -> Iterator[None]:
    """Turn what the system says of a file into a sentence about `what`: permission, type, length of the name, loops.

    `missing` says what to do where there is no such file. Raises UserError.
    """
    try:
        yield
    except OSError as error:
        remedy = f": {missing}" if error.errno in NOT_THERE else ""
        name = shorten(str(error.filename or what))
        raise UserError(f"{name}: {error.strerror or one_line(error)}{remedy}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{what}: not UTF-8 text (byte {error.start}): save it as UTF-8") from error
    except RecursionError as error:
        raise UserError(f"{what}: nested too deep: write it flat") from error


def shorten(text: str, limit: int = 100) -> str:
    """Return a text that fits a sentence: a long one without its middle, since a path's last name says most."""
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]}...{text[-half:]}"


def check_regular(file: Path, missing: str = "give an existing file") -> Path:
    """Return the file. Raises UserError where it is missing, not readable, a pointer of Git LFS, or a folder."""
    with refuse_unreadable(shorten(str(file)), missing), file.open("rb") as stream:
        if stream.read(len(LFS_POINTER)) == LFS_POINTER:
            raise UserError(f"{file}: a pointer of Git LFS, not the file: run `git lfs pull` in its folder")
    return file


def read_bytes(file: Path, limit: int = TEXT_BYTES) -> bytes:
    """Return a file's content. Raises UserError as `check_regular`, and for a file of more than `limit` bytes."""
    with refuse_unreadable(file), check_regular(file).open("rb") as stream:
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise UserError(f"{file}: larger than {limit:,} bytes: give the file that was meant")
    return content


def read_text(file: Path, limit: int = TEXT_BYTES) -> str:
    """Return a file of UTF-8, with or without a byte order mark. Raises UserError as `read_bytes`, and for others."""
    with refuse_unreadable(file):
        return read_bytes(file, limit).decode("utf-8-sig")


def read_yaml(file: Path) -> Any:
    """Read a YAML file. Raises UserError as `read_text` and `parse_yaml`."""
    return parse_yaml(read_text(file, YAML_BYTES), str(file))


def parse_yaml(text: str, where: str, loader: "type[_Loader] | None" = None) -> Any:
    """Parse YAML. Raises UserError for invalid YAML, a name twice, tags, and numbers that are not finite."""
    try:
        return (loader or _Loader)(text).get_single_data()
    except RecursionError as error:
        raise UserError(f"{where}: nested too deep: write it flat") from error
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{where}: not valid YAML: {one_line(error, None)}") from error


def parse_override(text: str, where: str) -> Any:
    """Parse the value of an override as YAML in which # begins no comment, and text without quotes stays as it is.

    Raises UserError as `parse_yaml`.
    """
    value = parse_yaml(text, where, _OverrideLoader)
    is_plain = isinstance(value, str) and text.strip()[0] not in YAML_MARKS
    return text.strip() if is_plain else value


def read_json(file: Path, limit: int = TEXT_BYTES) -> Any:
    """Read a JSON file. Raises UserError as `read_text` and `parse_json`."""
    return parse_json(read_text(file, limit), str(file))


def parse_json(text: str | bytes, where: str, remedy: str = "correct it, or copy the file again") -> Any:
    """Parse JSON. Raises UserError for invalid JSON (`remedy`: what to do) and numbers that are not finite."""
    try:
        return json.loads(text, parse_constant=_finite, parse_float=_finite)
    except RecursionError as error:
        raise UserError(f"{where}: nested too deep: write it flat") from error
    except ValueError as error:
        raise UserError(f"{where}: not valid JSON ({one_line(error)}): {remedy}") from error


def has_column(columns: Mapping[str, Any], name: str) -> bool:
    """Return whether a row has a column, as `read_column` reads it."""
    return _inside(columns, name) is not MISSING


def read_column(columns: Mapping[str, Any], name: str) -> Any:
    """Return a column of a row. A dotted name reads inside one: `reward_model.ground_truth`, `choices.0`.

    A column whose own name has the dots is preferred. Raises KeyError where there is none.
    """
    if (found := _inside(columns, name)) is MISSING:
        raise KeyError(name)
    return found


def _inside(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        if name in value:
            return value[name]
        splits = ((name[: dot.start()], name[dot.end() :]) for dot in re.finditer(r"\.", name))
        found = (_inside(value[first], rest) for first, rest in splits if first in value)
        return next((item for item in found if item is not MISSING), MISSING)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        first, _, rest = name.partition(".")
        if re.fullmatch(r"-?\d{1,9}", first, re.ASCII) and -len(value) <= int(first) < len(value):
            item = value[int(first)]
            return _inside(item, rest) if rest else item
    return MISSING


def did_you_mean_column(name: str, columns: Mapping[str, Any]) -> str:
    """Return ' (did you mean X?)' for the column most like `name`, which may be inside of another one."""
    names = list(_dotted_names(columns))
    inside = [known for known in names if known.endswith(f".{name}")]
    return f" (did you mean {inside[0]}?)" if inside else did_you_mean(name, names)


def _dotted_names(columns: Mapping[str, Any]) -> Iterator[str]:
    for name, value in columns.items():
        yield str(name)
        if isinstance(value, Mapping):
            yield from (f"{name}.{inner}" for inner in _dotted_names(value))


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{shorten(text)} is no finite number")
    return value


class _Loader(yaml.SafeLoader):
    """Reads plain YAML: a second value of a name is an error."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        names = set[str]()
        for key, _ in node.value:
            if key.value in names:
                raise yaml.MarkedYAMLError(None, None, f"{key.value} is there twice: keep one", key.start_mark)
            if isinstance(key, yaml.ScalarNode):
                names.add(key.value)
        return node


class _OverrideLoader(_Loader):
    """Takes # as any other character."""

    def peek(self, index: int = 0) -> str:
        char = str(super().peek(index))
        return "x" if char == "#" else char  # the scanner looks at characters here, and copies them elsewhere


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    kept = {
        first: [(tag, pattern) for tag, pattern in patterns if tag not in (*NUMBERS, f"{TAG}timestamp")]
        for first, patterns in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    return kept | {first: [*kept.get(first, ()), *NUMBERS.items()] for first in "-+.0123456789"}


_Loader.yaml_implicit_resolvers = _resolvers()
