"""Remove passwords, keys and tokens of settings from messages and loggers."""

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

MASK = "***"
SHORTEST_VALUE = 8  # characters of an environment variable that is looked for: a shorter one may be a word
WORDS = "key|token|secrets?|passwords?|passwd|passphrase|credentials?|authorization|auth|cookies?|signature"
LAST_WORD = re.compile(rf"(?:^|[^a-z0-9])(?:{WORDS}|apikey)$")
NO_SECRETS = re.compile(r"^(?:pad|eos|bos|unk|cls|sep|mask|stop|image)_token$")
HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")  # in apiKey, APIKey
LOGIN = re.compile(r"(?<=://)[^/@\s]+@")  # in an address


def is_secret_name(name: str) -> bool:
    """Return whether values of this name are secret, as of api_key, apiKey, X-Api-Key or HF_TOKEN."""
    words = HUMP.sub("_", name).lower()
    return bool(LAST_WORD.search(words)) and not NO_SECRETS.match(words)


def without_secrets(value: Any, environment: Mapping[str, str] = os.environ) -> Any:
    """Return settings as they may leave the machine.

    Values of secret names become None. Texts lose logins of addresses and values of the environment's secret variables,
    which are those with a secret name and those that a setting `..._env` names.
    """
    variables = {name for name in environment if is_secret_name(name)} | set(_named_variables(value))
    found = (environment.get(name, "").strip() for name in variables)  # a key is sent without blanks around it
    values = {value for value in found if len(value) >= SHORTEST_VALUE}
    return _redact(value, sorted(values, key=len, reverse=True))


def has_secrets(value: Any) -> bool:
    """Return whether settings hold secrets, values of the environment aside."""
    return bool(without_secrets(value, {}) != value)


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
        return {name: None if is_secret_name(str(name)) else _redact(inner, values) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_redact(inner, values) for inner in value]
    if isinstance(value, str):
        for secret in values:
            value = value.replace(secret, MASK)
        return LOGIN.sub("", value)
    return value
