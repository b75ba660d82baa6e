import league_rows as make
import pytest

from metaseq_lm.reporting.settings import Row


@pytest.fixture
def baseline() -> Row:
    return make.make_row("causal", 0.8)


@pytest.fixture
def row() -> Row:
    return make.make_row("mine", 0.9, control=make.make_row("twin", 0.7))
