"""Read files of users: text, YAML, JSON, columns of data rows. Errors are one sentence that names the file."""

import errno
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from grpo_mp.utils.errors import UserError, one_line

YAML_BYTES = 2**18
TEXT_BYTES = 2**28  # a hundred times the tensor index of the largest model
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)
LONGEST_PATH = 400  # in a message, to be copied from it
MISSING = object()  # marks a column that a row lacks; None is a value
TAG = "tag:yaml.org,2002:"
YAML_MARKS = "'\"|>&!"  # first characters of quoted text, blocks, anchors and tags
# Stricter than YAML 1.1, in which 1:30 is 90, 010 is 8, and 2024-01-01 is a date. Here, these three are text.
NUMBERS = {
    f"{TAG}int": re.compile(r"[-+]?(?:0|[1-9][0-9_]*)$|0x[0-9a-fA-F]+$"),
    f"{TAG}float": re.compile(
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+][0-9]+)?$|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
    ),
}


@contextmanager
def refuse_unreadable(what: Path | str, missing: str = "give an existing file") -> Iterator[None]:
    """Convert errors of the body (missing file, permission, encoding, too deep nesting) to a UserError about `what`.

    `missing`: advice for a file that does not exist.
    """
    try:
        yield
    except OSError as error:
        remedy = f": {missing}" if error.errno in NOT_THERE else ""
        name = shorten(str(error.filename or what), LONGEST_PATH)
        raise UserError(f"{name}: {error.strerror or one_line(error)}{remedy}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{what}: not UTF-8 text (byte {error.start}): save it as UTF-8") from error
    except RecursionError as error:
        raise UserError(f"{what}: nested too deep: write it flat") from error


def shorten(text: str, limit: int = 100) -> str:
    """Replace the middle of a text that is longer than `limit` with "...". Keeps the end, as it identifies a path."""
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]}...{text[-half:]}"


def check_regular(file: Path, missing: str = "give an existing file") -> Path:
    """Return `file`. Raises UserError if it is missing, unreadable, a folder, or a Git LFS pointer."""
    with refuse_unreadable(shorten(str(file), LONGEST_PATH), missing), file.open("rb") as stream:
        if stream.read(len(LFS_POINTER)) == LFS_POINTER:
            raise UserError(f"{file}: a pointer of Git LFS, not the file: run `git lfs pull` in its folder")
    return file


def read_bytes(file: Path, limit: int = TEXT_BYTES) -> bytes:
    """Return the content of a file of at most `limit` bytes. Raises UserError for a larger file."""
    with refuse_unreadable(file), check_regular(file).open("rb") as stream:
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise UserError(f"{file}: larger than {limit:,} bytes: give the file that was meant")
    return content


def read_text(file: Path, limit: int = TEXT_BYTES) -> str:
    """Return the text of a UTF-8 file without its byte order mark. Raises UserError for other encodings."""
    with refuse_unreadable(file):
        return read_bytes(file, limit).decode("utf-8-sig")


def read_yaml(file: Path) -> Any:
    """Read a YAML file, see `parse_yaml`."""
    return parse_yaml(read_text(file, YAML_BYTES), str(file))


def parse_yaml(text: str, where: str, loader: "type[_Loader] | None" = None) -> Any:
    """Parse YAML. Raises UserError for invalid YAML, duplicate keys and tags."""
    try:
        return (loader or _Loader)(text).get_single_data()
    except RecursionError as error:
        raise UserError(f"{where}: nested too deep: write it flat") from error
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{where}: not valid YAML: {one_line(error, None)}") from error


def parse_override(text: str, where: str) -> Any:
    """Parse the value of an override: YAML without comments, in which text without quotes keeps its line breaks."""
    value = parse_yaml(text, where, _OverrideLoader)
    return text.strip() if isinstance(value, str) and text.strip()[0] not in YAML_MARKS else value


def read_json(file: Path, limit: int = TEXT_BYTES) -> Any:
    """Read a JSON file, see `parse_json`."""
    return parse_json(read_text(file, limit), str(file))


def parse_json(text: str | bytes, where: str, remedy: str = "correct it, or copy the file again") -> Any:
    """Parse JSON. Raises UserError for invalid JSON, infinity and NaN. `remedy`: advice that ends the message."""
    try:
        return json.loads(text, parse_constant=_finite, parse_float=_finite)
    except RecursionError as error:
        raise UserError(f"{where}: nested too deep: write it flat") from error
    except ValueError as error:
        raise UserError(f"{where}: not valid JSON ({one_line(error)}): {remedy}") from error


def json_object(text: str | bytes) -> dict[str, Any] | None:
    """Parse a text as a JSON object; return None if the text is anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def has_column(columns: Mapping[str, Any], name: str) -> bool:
    """Return whether `read_column` finds a column in a row."""
    return _inside(columns, name) is not MISSING


def read_column(columns: Mapping[str, Any], name: str) -> Any:
    """Return a column of a row. A dot in `name` reads inside a column: `reward_model.ground_truth`, `choices.0`.

    A column whose name itself contains the dots takes precedence. Raises KeyError if there is no such column.
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


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{shorten(text)} is no finite number")
    return value


class _Loader(yaml.SafeLoader):
    """Safe YAML loader that rejects duplicate keys and parses numbers by NUMBERS."""

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
    """YAML loader without comments."""

    def peek(self, index: int = 0) -> str:
        char = str(super().peek(index))
        return "x" if char == "#" else char  # the scanner looks for comments by `peek`, and copies text by `prefix`


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in patterns if tag not in (*NUMBERS, f"{TAG}timestamp")]
    for first, patterns in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern in NUMBERS.items():
    _Loader.add_implicit_resolver(_tag, _pattern, list("-+.0123456789"))
