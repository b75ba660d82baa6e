"""Removal of secrets from command lines and options before they are stored.

docs/promises.md lists what is recognised; a secret in free text, without a name, is not.
"""

import re
import shlex
from collections.abc import Sequence
from typing import Any

MASK = "***"
SECRET = r"passw(?:or)?d\w*|passphrase\w*|pwd|secret\w*|credential\w*|authorization"
NAME = re.compile(rf"\S*(?:token|key|{SECRET})", re.IGNORECASE)
KEY = r"(?:[\w.-]*[_.-])?(?:api|access|auth|private|hub)?key"  # but not monkey=3 in a path
_COUNT = re.compile(r"\S*token", re.IGNORECASE)  # may be a number
NUMBER = re.compile(r"[+-]?[\d.]+(/.*)?|true|false|null")  # task.task_token=2 is no secret
_USER = re.compile(r"(\w+://)[^/\s]*@")  # as in https://user:password@host
# A value ends with its quotes; without quotes at a blank or bracket, or before the next key=value.
VALUE = r"""
    "[^"]*" | '[^']*'
    | (?:bearer|basic)\s+[^\s'"]+
    | (?: [^\s&'"(){}\[\],;] | [,;](?!\s*['"]?[\w.-]+['"]?\s*[=:]) )+
"""
# name=value, --name value, "name": value or name: value within a text, such as a URL's query or
# JSON.
_INNER = re.compile(
    rf"""
    (?P<name>(?<![\w.-])(?:{KEY}|[\w.-]*(?:token|{SECRET})))
    (?P<between>['"]?\s*=\s* | ['"]\s*:\s* | :)
    (?P<value>{VALUE})
    | (?P<long_name>[\w.-]*[_.-](?:token|key) | [\w.-]*(?:{SECRET}))
    (?P<colon>:\s+)
    (?P<long_value>{VALUE})
    | (?P<option>--?(?:{KEY}|[\w.-]*(?:token|{SECRET})))
    (?P<blank>\s+)
    (?P<argument>(?!-){VALUE})
    """,
    re.IGNORECASE | re.VERBOSE,
)
# Tokens of services, by their documented prefixes, and private keys (RFC 7468).
_ISSUED = re.compile(
    r"(?s:-----BEGIN [A-Z\d ]*PRIVATE KEY(?: BLOCK)?-----(?:.*?-----END [A-Z\d ]+-----|.*))"
    r"|(?<![\w-])(?:sk-(?:[a-z]+\d*-){0,2}\w{20,}|hf_\w{16,}"
    r"|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|xox[abprs]-[\w-]{10,}|AKIA[A-Z\d]{16}|AIza[\w-]{35}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+)"
)


def masked(words: Sequence[str]) -> str:
    """Return a command line for a shell, with *** as the values of secrets (hub_token=...)."""
    shown = []
    hide = False  # whether this word is the value of an option such as --hub-token
    for word in words:
        name, equals, _ = word.partition("=")
        if hide and not word.startswith("-"):
            word = MASK
        hide = word.startswith("-") and not equals and bool(NAME.fullmatch(name))
        shown.append(mask(word))
    return shlex.join(shown)


def mask(word: str) -> str:
    """Return a word with *** as the value of key=value if the key is named like a secret.

    `mask_text` masks secrets inside the values of other keys.
    """
    name, equals, value = word.partition("=")
    if equals and _is_secret(name, value):
        return f"{name}={MASK}"
    return mask_text(word)


def _is_secret(name: str, value: str) -> bool:
    """Return whether a value of this name must be masked."""
    if not NAME.fullmatch(name) or not value.strip("'\""):
        return False
    return not (_COUNT.fullmatch(name) and NUMBER.fullmatch(value.strip("'\"")))


def mask_text(text: str) -> str:
    """Replace values of names like secrets, users in URLs, private and issued keys by ***."""
    return _ISSUED.sub(MASK, _USER.sub(rf"\1{MASK}@", _INNER.sub(_mask_match, text)))


def _mask_match(match: re.Match[str]) -> str:
    name, between, value = (part for part in match.groups() if part is not None)
    if not _is_secret(name, value):
        return match[0]
    quote = value[0] if value[0] in "'\"" else ""
    return f"{name}{between}{quote}{MASK}{quote}"


def hidden_options(options: Any, name: str = "") -> list[str]:
    """Return the dotted names of the options with values that `mask_options` has masked."""
    if isinstance(options, dict):
        pairs = [(f"{name}.{key}" if name else str(key), value) for key, value in options.items()]
        return [hidden for key, value in pairs for hidden in hidden_options(value, key)]
    return [name] if MASK in str(options) else []


def mask_options(options: Any, name: str = "") -> Any:
    """Return options, nested as in a configuration, with *** in place of secrets."""
    if isinstance(options, dict):
        return {key: mask_options(value, str(key)) for key, value in options.items()}
    if isinstance(options, list):
        return [mask_options(value, name) for value in options]
    if isinstance(options, str):
        return mask(f"{name}={options}").partition("=")[2]
    return options
