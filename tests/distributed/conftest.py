"""Pools of 2 and 4 processes, shared by the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pool import Ranks


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.close()
