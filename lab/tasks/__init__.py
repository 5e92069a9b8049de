"""Training tasks that need no download: for examples, experiments and the command line."""

from __future__ import annotations

from inspect import signature
from typing import Any

from hdet.errors import ArgumentError
from lab.tasks.digits import DigitsTask
from lab.tasks.feed import FeedTask
from lab.tasks.task import Batch, Task, batches
from lab.tasks.text import TextTask

__all__ = ["Batch", "DigitsTask", "FeedTask", "Task", "TextTask", "batches", "task_named"]

_TASKS: dict[str, type[FeedTask] | type[TextTask] | type[DigitsTask]] = {
    "feed": FeedTask,
    "text": TextTask,
    "digits": DigitsTask,
}


def task_named(name: str, **options: Any) -> Task:
    """The task of that name: "feed", "text" or "digits"; options go to its class."""
    if name not in _TASKS:
        raise ArgumentError(f"the task must be one of {', '.join(_TASKS)}, but got {name!r}")
    known = list(signature(_TASKS[name]).parameters)
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ArgumentError(f"the task {name} has the options {', '.join(known)}, but got {', '.join(unknown)}")
    return _TASKS[name](**options)
