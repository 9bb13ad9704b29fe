"""Removal of passwords, keys and tokens from settings before they are displayed or logged."""

import re
from collections.abc import Mapping
from typing import Any

WORDS = "key|token|secrets?|passwords?|passwd|passphrase|credentials?|authorization|auth|cookies?|signature"
LAST_WORD = re.compile(rf"(?:^|[^a-z0-9])(?:{WORDS}|apikey)$")
NO_SECRETS = re.compile(r"^(?:pad|eos|bos|unk|cls|sep|mask|stop|image)_token$")
HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")  # word boundaries in apiKey and APIKey
LOGIN = re.compile(r"(?<=://)[^/@\s]+@")  # user and password in a URL


def without_secrets(value: Any) -> Any:
    """Return settings with secrets replaced by None and logins removed from URLs."""
    if isinstance(value, Mapping):
        return {name: None if _is_secret(str(name)) else without_secrets(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(inner) for inner in value]
    return LOGIN.sub("", value) if isinstance(value, str) else value


def _is_secret(name: str) -> bool:
    words = HUMP.sub("_", name).lower()
    return bool(LAST_WORD.search(words)) and not NO_SECRETS.match(words)


def has_secrets(value: Any) -> bool:
    """Return whether settings contain secrets or URLs with a login."""
    return bool(without_secrets(value) != value)
