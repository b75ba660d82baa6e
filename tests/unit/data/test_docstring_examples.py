"""The examples in docstrings of index algebra are true."""

import doctest
from types import ModuleType

import pytest

from metaseq_lm.data.corpus import packing
from metaseq_lm.data.labelled import token_labels
from metaseq_lm.data.words import buckets


@pytest.mark.parametrize("module", [packing, token_labels, buckets])
def test_examples_of_docstrings(module: ModuleType) -> None:
    failed, attempted = doctest.testmod(module, extraglobs={"np": module.np})
    assert attempted and not failed
