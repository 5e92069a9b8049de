"""What every test of the command line needs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sklearn.datasets  # noqa: F401 - here, because its import sets environment variables, and tests must not
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The models are too small for more, and the processes have one too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
