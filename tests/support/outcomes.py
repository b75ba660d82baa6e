"""How a command ended, and the facts that it named: file and line, key, value, number, remedy."""

from collections.abc import Sequence
from typing import Any

import pytest


def expect(result: Sequence[Any], code: int, *facts: str) -> None:
    """Check a result that starts with (exit code, output): no traceback, and every fact in it."""
    found, text = result[:2]
    assert found == code and "Traceback" not in text, text
    expect_facts(text, *facts)


def expect_facts(text: str, *facts: str) -> None:
    """Check that every fact is in a text."""
    assert not [fact for fact in facts if fact not in text], text


def expect_error(capsys: pytest.CaptureFixture, found: int, code: int, *facts: str) -> None:
    """Check the exit code `found` of a command, and what it wrote to standard error."""
    expect((found, capsys.readouterr().err), code, *facts)
