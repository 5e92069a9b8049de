"""The errors and warnings that hdet raises. Messages say the value, the rule and the cure."""

from __future__ import annotations


def harmless(text: str) -> str:
    r"""For a terminal: control characters are spelled out, except for ends of lines and tabs.

    >>> print(harmless("\x1b[31mred, \u202e, caf\xe9"))
    \x1b[31mred, \u202e, café
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


REPORTS = ("jinja2", "plotly", "rich", "typer")
"""The packages of the extras cli and report."""
INSTALL = f"run `pip install {' '.join(REPORTS)}`, which the extras cli and report stand for"
"""What to do if packages of the command line or of a report are missing, wherever hdet has been installed from."""


class HdetError(Exception):
    """Base of every error that hdet raises by itself."""

    def __str__(self) -> str:
        return harmless(super().__str__())  # it may name a file, or what stands in one


class ArgumentError(HdetError, ValueError):
    """An argument is outside its range. Raised before anything is changed."""


class ShardedParametersError(ArgumentError):
    """Parameters are sharded in a way that cannot be handled, or over ranks that should be different replicas."""


class DisagreementError(HdetError, RuntimeError):
    """Replicas were set up or are called differently. Raised on every rank: shows the odd ranks and a usual one."""


class DivergedError(HdetError, RuntimeError):
    """No replica is left with a finite loss and finite weights, or a :class:`hdet.Guard` would roll back more than it
    may. Load an earlier checkpoint."""


class LostReplicaError(HdetError, RuntimeError):
    """A collective failed or ran into the group's time-out: names the missing ranks, and when each was last seen."""


class JournalError(HdetError, ValueError):
    """A file is not a journal, or its schema version is one that this hdet does not read."""


class CheckpointError(HdetError, RuntimeError):
    """A checkpoint could not be written or read. Raised on every rank; what was there before is still there."""


class CheckpointWarning(UserWarning):
    """A checkpoint is damaged, and the one before it was loaded."""


class ResumeWarning(UserWarning):
    """Replicas were resumed inside a round, whose loss sums start at zero; or a search without its tensors; or a run
    without a search, whose length differs from the scheduler's."""


class ProbeWarning(UserWarning):
    """A probe has no new batches."""


class RollbackWarning(UserWarning):
    """Training diverged, and a :class:`hdet.Guard` has rolled it back."""


class SearchWarning(UserWarning):
    """The rate cannot be found, training diverged and was rolled back, or nothing was learned."""
