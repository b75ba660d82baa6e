"""Command lines without the secrets that may stand in them, to be kept in files."""

import re
import shlex
from collections.abc import Sequence

MASK = "***"
NAME = re.compile(
    r"\S*(token|key|passw(or)?d\w*|passphrase\w*|secret\w*|credential\w*)", re.IGNORECASE
)
NUMBER = re.compile(r"['\"]?[+-]?[\d.]*['\"]?|true|false|null")  # task.task_token=2 is no secret
USER = re.compile(r"(\w+://)[^/@\s]*@")  # of https://user:password@host


def masked(words: Sequence[str]) -> str:
    """Return a command line for a shell, with *** for values named like secrets (hub_token=...)."""
    shown = []
    hide = False  # the value of an option such as --hub-token
    for word in words:
        name, equals, value = word.partition("=")
        if hide and not word.startswith("-"):
            word = MASK
        hide = word.startswith("-") and not equals and bool(NAME.fullmatch(name))
        if equals and NAME.fullmatch(name) and not NUMBER.fullmatch(value):
            word = f"{name}={MASK}"
        shown.append(USER.sub(rf"\1{MASK}@", word))
    return shlex.join(shown)
