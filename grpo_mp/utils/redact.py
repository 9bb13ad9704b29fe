"""Keep passwords, keys and tokens out of messages and out of what loggers are given. Pure but for the environment."""

import base64
import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote, unquote, urlsplit

MASK = "***"
SHORTEST_VALUE = 8  # characters of an environment variable that is looked for: a shorter one may be a word
WORDS = "key|token|secrets?|passwords?|passwd|passphrase|pwd|credentials?|authorization|auth|cookies?|signature|sig"
LAST_WORD = re.compile(rf"(?:^|[^a-z0-9])(?:{WORDS}|apikey)$")
NO_SECRETS = re.compile(r"^(?:pad|eos|bos|unk|cls|sep|mask|stop|image)_token$")
HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")  # in apiKey, APIKey
LOGIN = re.compile(r"(?<=://)[^/@\s]+@")  # in an address
SCHEME = re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]{8,}", re.IGNORECASE)
# NAME=VALUE of a query, a shell or an option, `--NAME VALUE`, `NAME: VALUE` of a header, "NAME": "VALUE" of JSON. A
# colon without a blank or a quote after it is one of file.py:name.
ASSIGNED = re.compile(
    rf"(?P<name>(?P<dashes>(?<![\w-])--?)?[\w.-]*(?:{WORDS}))"
    r"(?P<between>[\"']?\s*(?:=\s*|:\s+|:(?=[\"']))[\"']?|\s+)"
    r"(?P<value>(?:(?:bearer|basic|token)\s+)?[^\s&\"',;}]+)",
    re.IGNORECASE,
)


def is_secret_name(name: str) -> bool:
    """Return whether what has this name is secret, as api_key, apiKey, X-Api-Key or HF_TOKEN; not api_key_env."""
    words = HUMP.sub("_", name).lower()
    return bool(LAST_WORD.search(words)) and not NO_SECRETS.match(words)


def without_secrets(value: Any, environment: Mapping[str, str] = os.environ) -> Any:
    """Return settings as they may leave the machine.

    The value of a secret name becomes None, in mappings at any depth. In texts, logins of addresses go, and values of
    secret names in queries, headers and command lines are masked, as are values of the environment's secret variables
    and of those that a setting `..._env` names.
    """
    variables = {name for name in environment if is_secret_name(name)} | set(_named_variables(value))
    found = (environment.get(name, "").strip() for name in variables)  # a key is sent without blanks around it
    values = {value for value in found if len(value) >= SHORTEST_VALUE}
    return _redact(value, sorted(values, key=len, reverse=True))


def has_secrets(value: Any) -> bool:
    """Return whether settings hold what `without_secrets` takes out, but for values of the environment."""
    return bool(without_secrets(value, {}) != value)


def redact_text(text: str, values: Iterable[str] = ()) -> str:
    """Return a text without logins, values of secret names, and `values`."""
    for value in values:
        text = text.replace(value, MASK)
    return ASSIGNED.sub(_mask_value, SCHEME.sub(rf"\1 {MASK}", LOGIN.sub("", text)))


def split_login(url: str) -> tuple[str, dict[str, str]]:
    """Return an address without its login, and the header that sends the login instead; none without one."""
    parts = urlsplit(url)
    if parts.username is None:
        return url, {}
    login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return LOGIN.sub("", url, count=1), {"Authorization": f"Basic {base64.b64encode(login.encode()).decode()}"}


def mask_headers(text: str, headers: Mapping[str, str]) -> str:
    """Return a server's answer, or an error, without what the request's headers said, should it repeat that.

    It may quote it as Python, JSON or an address would.
    """
    for value in headers.values():
        scheme, _, secret = value.rpartition(" ")
        secrets = [secret]
        if scheme == "Basic":
            secrets.append(base64.b64decode(secret).decode().partition(":")[2])
        for form in sorted({form for secret in secrets for form in _quoted(secret)}, key=len, reverse=True):
            text = text.replace(form, MASK)
    return text


def _quoted(secret: str) -> Iterable[str]:
    """Return a secret as it is, and as it is within quotes and addresses."""
    forms = (secret, repr(secret)[1:-1], repr(secret.encode())[2:-1], json.dumps(secret)[1:-1], quote(secret, safe=""))
    return filter(None, forms)


def _named_variables(value: Any) -> Iterable[str]:
    """Yield the variables that settings name as the place of a key."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if isinstance(inner, str) and str(name).endswith("_env"):
                yield inner
            yield from _named_variables(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _named_variables(inner)


def _redact(value: Any, values: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {
            redact_text(str(name), values): None if is_secret_name(str(name)) else _redact(inner, values)
            for name, inner in value.items()
        }
    if isinstance(value, list | tuple):
        shown = [_redact(inner, values) for inner in value]
        after_option = [False, *(_is_secret_option(inner) for inner in value[:-1])]  # of a command's arguments
        return (
            [MASK if is_value else inner for is_value, inner in zip(after_option, shown, strict=True)] if value else []
        )
    return redact_text(value, values) if isinstance(value, str) else value


def _is_secret_option(argument: Any) -> bool:
    return isinstance(argument, str) and argument.startswith("-") and is_secret_name(argument.lstrip("-"))


def _mask_value(match: re.Match[str]) -> str:
    is_option = not match["between"].isspace() or match["dashes"]
    return f"{match['name']}{match['between']}{MASK}" if is_option and is_secret_name(match["name"]) else match[0]
