from pathlib import Path

import pytest
from tartan_bench import make_data


@pytest.fixture(scope="session")
def topics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with a labelled set "topic" and the splits "train" and "long" of its domain."""
    return make_data(tmp_path_factory.mktemp("topics"))
