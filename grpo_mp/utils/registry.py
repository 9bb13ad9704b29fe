"""Registries of extensions: built-in ones by name, those of users by import path."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar, cast

from grpo_mp.utils.errors import UserError, did_you_mean
from grpo_mp.utils.reading import shorten
from grpo_mp.utils.user_code import PATH_FORMAT, is_path, load_attribute

T = TypeVar("T")


@dataclass(frozen=True)
class LazyEntry:
    """Import path of a built-in extension, imported on first use so that reading settings needs no torch."""

    path: str  # 'module:attribute'


@dataclass(frozen=True)
class Registry(Generic[T]):
    """Extensions of one kind: built-in ones by name, those of users by 'module:attribute' or 'file.py:attribute'.

    `parameters`: names of the positional arguments of a call. The user's `args` are passed by name.
    `keywords`: names of further arguments that are passed by name; a call may add more that are not known here.
    `instance`: class of which the extension must be an instance, instead of a function.
    `makes`: an extension may be a class; `resolve` then instantiates it with the user's `args` and returns the object.
    """

    kind: str  # for messages: "policy loss"
    built_in: Mapping[str, T | LazyEntry] = field(default_factory=dict)
    parameters: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    instance: type | None = None
    makes: bool = False
    usage: str = ""  # advice in the message for an extension with a wrong signature

    def check_name(self, name: str) -> str:
        """Return `name`. Raises ValueError, with the closest known name, if it is neither built in nor a path."""
        if name in self.built_in or is_path(name):
            return name
        if not self.built_in:
            raise ValueError(f"{shorten(name)!r} is no {self.kind}: {PATH_FORMAT}")
        known = ", ".join(self.built_in)
        raise ValueError(
            f"unknown {self.kind} {shorten(name)!r}{did_you_mean(name, self.built_in)}: there are {known}; "
            f"or {PATH_FORMAT}"
        )

    def resolve(self, name: str, setting: str, args: Mapping[str, Any] | None = None) -> T:
        """Return the extension called `name`, with the user's `args` bound to it.

        `setting`: name of the setting, for messages. Raises UserError for an unknown name, a failing import, or an
        extension that does not accept the arguments of this kind.
        """
        try:
            extension: Any = self.built_in.get(self.check_name(name), LazyEntry(name))
        except ValueError as error:
            raise UserError(f"{setting}: {error}") from error
        label = f"{setting} {shorten(name)!r}"
        if isinstance(extension, LazyEntry):
            extension = load_attribute(extension.path, label)
        if self.makes and isinstance(extension, type):
            try:
                inspect.signature(extension).bind(**(args or {}))
            except TypeError as error:
                raise UserError(f"{label}: its arguments: {error}") from error
            extension = extension(**(args or {}))
            args = None
        self._check(extension, label, args or {})
        return cast(T, partial(extension, **args) if args else extension)

    def _check(self, extension: Any, label: str, args: Mapping[str, Any]) -> None:
        if self.instance:
            if not isinstance(extension, self.instance):
                kind = f"{self.instance.__module__}.{self.instance.__name__}"
                raise UserError(f"{label}: as {self.kind} it must be a {kind}, not {type(extension).__name__}")
            return
        if not callable(extension):
            raise UserError(f"{label}: as {self.kind} it must be a function, not {type(extension).__name__}")
        names = ", ".join((*self.parameters, *(f"{name}=" for name in (*self.keywords, *args))))
        try:
            signature = inspect.signature(extension)
            bind = signature.bind_partial if self.keywords else signature.bind
            bind(*self.parameters, **dict.fromkeys(self.keywords), **args)
        except TypeError as error:
            usage = f"; {self.usage}" if self.usage else ""
            raise UserError(f"{label}: as {self.kind} it is called with ({names}): {error}{usage}") from error
        except ValueError:
            return  # functions written in C may have no signature
