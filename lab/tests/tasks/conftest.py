"""Small tasks: the real ones with fewer and smaller parts."""

from __future__ import annotations

import pytest
import sklearn.datasets  # noqa: F401 - here, because its import sets environment variables, and tests must not

from lab.tasks import Task, task_named

SMALL = {
    "feed": {"users": 64, "items": 64, "history": 4, "width": 8, "depth": 1, "batch_size": 16},
    "text": {"width": 8, "depth": 1, "heads": 2, "context": 12, "batch_size": 8},
    "digits": {"width": 4, "batch_size": 16},
}


@pytest.fixture(scope="package", params=sorted(SMALL))
def task(request: pytest.FixtureRequest) -> Task:
    """Each task, small."""
    return task_named(request.param, **SMALL[request.param])
