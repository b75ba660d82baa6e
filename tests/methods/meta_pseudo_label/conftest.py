from pathlib import Path

import pytest
from meta_pseudo_data import make_even, make_ragged
from superglue_data import make_superglue


@pytest.fixture(scope="session")
def even(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data like Two Moons: every line has 34 tokens."""
    return make_even(tmp_path_factory.mktemp("even"))


@pytest.fixture(scope="session")
def ragged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data with lines of 6 to 34 tokens, so that batches are padded."""
    return make_ragged(tmp_path_factory.mktemp("ragged"))


@pytest.fixture(scope="session")
def superglue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of sentences, and MultiRC, ReCoRD and CB as text."""
    return make_superglue(tmp_path_factory.mktemp("superglue"))
