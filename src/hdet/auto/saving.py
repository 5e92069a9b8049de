"""A search in a checkpoint: plain numbers in lists, and tensors beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from hdet.auto.measure import Measure
from hdet.auto.memory import Memory
from hdet.auto.progress import Progress
from hdet.auto.rule import HIGHEST, LOWEST, State
from hdet.checks import STATE_VERSION, STATE_WORDS, Rule, check_state, count, is_finite, number, shown, some_rates
from hdet.distributed.group import Seat
from hdet.errors import ArgumentError
from hdet.rollback.losses import Losses
from hdet.rollback.retreat import Snapshot
from hdet.rollback.saving import course_of, fields_of, in_named_pairs, losses_of, named, plain
from hdet.rollback.snapshots import Snapshots

_LEVEL = Rule("a number within the bounds of a search", lambda value: is_finite(value) and LOWEST <= value <= HIGHEST)
_NAMES = {"rounds": "ended", "is_falling": "falling"}
"""What the fields of a memory are called in a file, if not as here."""
_RECORDS = ("found", "progress")
"""Those that have fields of their own."""


def saved_memory(memory: Memory) -> dict[str, Any]:
    """By name, without snapshots: they are saved with what lies in them."""
    own = {_NAMES.get(name, name): plain(value) for name, value in vars(memory).items() if name not in _RECORDS}
    return {"search": saved(memory.found), **own, "progress": in_named_pairs(memory.progress)}


def loaded_memory(state: Mapping[str, Any]) -> Memory:
    """From :func:`saved_memory`. What does not fit raises."""
    check_state(state, {"ended": count(0), "highest": number, "peaks": some_rates}, STATE_WORDS)
    here = {field: state[name] for field, name in _NAMES.items() if name in state}
    own = fields_of(Memory, {**state, **here}, STATE_WORDS, but=_RECORDS)
    progress = fields_of(Progress, named(state, "progress", STATE_WORDS), STATE_WORDS)
    return Memory(found=loaded(state.get("search")), progress=Progress(**progress), **own)


def saved(state: State) -> list[list[Any]]:
    """What a search has learned, without snapshots."""
    rows = in_named_pairs(state, but=("snapshots",))
    return [[name, in_named_pairs(state.course) if name == "course" else value] for name, value in rows]


def loaded(search: Any) -> State:
    """From :func:`saved`. What does not fit raises."""
    what = f"{STATE_WORDS}, in what it says about the search,"
    found = named({"search": search}, "search", what)
    check_state(found, {"level": _LEVEL, "peak": number}, what)
    own = fields_of(State, found, what, but=("snapshots", "course"))
    return State(**own, course=course_of(found, "course", what))


def has_tensors(search: Any) -> bool:
    """Whether there is something to load in what a search held in tensors. Raises for what is no dict."""
    if not isinstance(search, Mapping):
        raise ArgumentError(
            f"the state of a search does not fit this scheduler: it must be a dict, but got {shown(search)}; give what "
            "search_state_dict() returned"
        )
    return len(search) > 0


def read_tensors(
    search: Any, optimizer: Optimizer, t: int, groups: Sequence[int], seat: Seat
) -> tuple[Losses, tuple[Snapshot, ...], Measure, Snapshots]:
    """The tensors of a search; raises unless they are of step ``t`` and fit the optimizer."""
    with _fitting(search, t):
        return (
            losses_of(search["losses"], seat),
            tuple(Snapshot(int(step), int(slot)) for step, slot in search["kept"]),
            Measure.loaded(search["measure"], groups, optimizer),
            Snapshots.loaded(search["snapshots"], optimizer),
        )


@contextmanager
def _fitting(search: Mapping[str, Any], t: int) -> Iterator[None]:
    """Inside, what lies in tensors is read, which must be of step ``t``: whatever does not fit becomes one error."""
    try:
        version, step = search["version"], search["step"]
        if (version, step) != (STATE_VERSION, t):
            raise ValueError(f"it is of version {version} at step {step}, the scheduler {STATE_VERSION} at {t}")
        yield
    except (KeyError, TypeError, IndexError, AttributeError, ValueError, RuntimeError) as error:
        raise ArgumentError(
            f"the state of a search does not fit this scheduler ({type(error).__name__}: {error}); load the "
            "scheduler's own state first, of the same checkpoint, or leave the search out"
        ) from error
