"""``hdet.save``, ``load``, ``exists``: a checkpoint that survives a kill at any moment, written by one rank for all."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hdet._version import __version__
from hdet.checkpoint.file import Whole, checkpoints_at, digest_of, newest_whole, read, write
from hdet.checks import is_one_of, must_be, must_count, shown
from hdet.errors import ArgumentError, CheckpointError, CheckpointWarning, HdetError, ShardedParametersError
from hdet.files import named, path_of
from hdet.ranks.agreement import check_equal
from hdet.ranks.group import ReplicaGroup, arriving, connect, find_replica_index
from hdet.ranks.presence import presence
from hdet.ranks.shards import is_sharded
from hdet.rollback.guard import Guard
from hdet.rollback.storage import leaves
from hdet.schedulers.auto_scheduler import AutoScheduler
from hdet.schedulers.replica_scheduler import ReplicaScheduler
from hdet.state import reading, version_words

Result = TypeVar("Result")
_Part = TypeVar("_Part")
_Backup = tuple[Any, dict[str, Any], dict[str, set[str]]]
"""The state of a part, those of the searches in it, and the names of the attributes of its schedulers."""
_FORMAT = 1
_ONE_FILE = "One rank writes for all: give every rank the same path."


def save(path: str | os.PathLike[str], /, *, keep: int = 2, search: bool = True, **parts: Any) -> None:
    """Write a checkpoint. All ranks call it; one writes, and an error on one is raised on all.

    .. code-block:: python

        hdet.save("run.pt", model=model, optimizer=optimizer, scheduler=scheduler, epoch=epoch)
        values = hdet.load("run.pt", model=model, optimizer=optimizer, scheduler=scheduler)
        epoch = values["epoch"]

    If replicas train apart, their consensus is saved. After a kill at any moment, or a full disk, the previous
    checkpoint is intact. ``torch.load(path, weights_only=True)`` reads the file too: keys are "states" and "values".

    One process writes to a path. If the file system has locks, another process is refused until the first has ended.

    Args:
        path: the file, the same on all ranks. Missing folders are made. An existing file keeps its mode.
        keep: how many checkpoints there are afterwards: this one at ``path``, the one before at ``path.hdet-1``, ... No
            other files are touched.
        search: whether to save, beside a scheduler's state, the tensors of a search for the rate: up to twice the
            weights, gradients and optimizer state. Without them a resumed search makes them again. Schedulers inside
            torch's ``SequentialLR`` and ``ChainedScheduler`` count too.
        parts: objects with ``state_dict()`` and ``load_state_dict()``: model, optimizer, scheduler, GradScaler; or
            plain values: tensors, numbers, texts, None, and lists and dicts of them.
    """
    what = f"hdet.save({named(path)})"
    group = _meet(what)
    file = _together(group, what, lambda: _checked(path, keep, search, parts))
    with arriving(what):
        check_equal(group.gather_objects({"path": str(path)}), _ONE_FILE)
    searches = _inside(parts, AutoScheduler)
    schedulers: list[Any] = [*_inside(parts, ReplicaScheduler).values(), *searches.values()]
    with ExitStack() as inside:
        for scheduler in schedulers:
            if not scheduler.rank_group.in_consensus:
                inside.enter_context(scheduler.consensus())
        what = f"writing {file}"
        with arriving(what):
            guards = {name: guard.state_of_all() for name, guard in _inside(parts, Guard).items()}
            saved = searches if search else {}
            losses = {name: group.gather_objects(one.search.losses.saved()) for name, one in saved.items()}
        _together(group, what, lambda: None if group.rank else write(file, _content(parts, guards, losses), keep))


def load(path: str | os.PathLike[str], /, *, ignore: Sequence[str] = (), **parts: Any) -> dict[str, Any]:
    """Resume from a checkpoint of :func:`save`. All ranks call it; their number may differ from when it was saved.

    The file's checksum is verified first. Then the parts load their states one after the other. If one of them does not
    fit, on any rank, all parts get back the state that they had, and the error names the part. Until then there is a
    copy of each state in the host's memory.

    A damaged file is skipped with a :class:`hdet.CheckpointWarning`, and the one before it is loaded.

    Args:
        path: as it was given to :func:`save`; every rank must see the file.
        ignore: names of parts that the file has and that are meant to be left out, for instance ``("scheduler",)``.
            Without it a missing part is an error, because a run would go on without its schedule, or without its
            moments. Modules alone, for evaluation, need no others.
        parts: objects as they were given to :func:`save`, under the same names; and plain values, which are the
            defaults for values that the file does not have.

    Returns:
        The plain values.
    """
    what = f"hdet.load({named(path)})"
    group = _meet(what)
    found = _from_first(group, what, lambda: newest_whole(_resolved(path)))
    if found.faults and group.rank == 0:
        text = f"{'; '.join(found.faults)}: went back to {found.file}, which was saved before"
        warnings.warn(text, CheckpointWarning, stacklevel=2)
    stateful = _together(group, what, lambda: _stateful(parts))
    content = _together(group, what, lambda: _checked_content(found, stateful, ignore))
    values = copy.deepcopy(content["values"])
    before: dict[str, _Backup] = {}
    try:
        _together(group, what, lambda: _load_parts(content, stateful, before))
    except HdetError:  # on this rank or on another
        _restore(stateful, before)
        raise
    return {**{name: value for name, value in parts.items() if name not in stateful}, **values}


def exists(path: str | os.PathLike[str], /) -> bool:
    """Whether :func:`load` finds a checkpoint: at ``path``, or a copy beside it. All ranks call it.

    .. code-block:: python

        if hdet.exists("run.pt"):
            hdet.load("run.pt", model=model, optimizer=optimizer, scheduler=scheduler)

    The answer is rank 0's. It is True for a damaged file too: :func:`load` goes back to a copy, or says what is wrong.
    """
    what = f"hdet.exists({named(path)})"
    return _from_first(_meet(what), what, lambda: any(checkpoints_at(_resolved(path))))


def _meet(what: str) -> ReplicaGroup:
    """The group of all ranks, which call ``what``: perhaps their first collective."""
    if find_replica_index(None).size > 1:
        presence().arrive(what)
    with arriving(what):
        return connect(None)


def _from_first(group: ReplicaGroup, what: str, action: Callable[[], Result]) -> Result:
    """The result of ``action`` on rank 0, for all ranks. Collective."""
    found = _together(group, what, lambda: None if group.rank else action())
    with arriving(what):
        return group.broadcast_object(found)  # type: ignore[return-value]  # rank 0's, which is there


def _together(group: ReplicaGroup, what: str, action: Callable[[], Result]) -> Result:
    """The result of ``action`` on this rank. If it fails on one rank, all raise. Collective."""
    failure: Exception | None = None
    result: Result | None = None
    try:
        result = action()
    except HdetError as error:
        failure = error
    except Exception as error:
        failure = CheckpointError(
            f"{what} failed: {type(error).__name__}: {error}; what was there before is still there"
        )
        failure.__cause__ = error
    with arriving(what):
        reasons = group.gather_objects(None if failure is None else str(failure))
    if failure is not None:
        raise failure
    if any(reasons):
        rank, reason = next((rank, text) for rank, text in enumerate(reasons) if text)
        raise CheckpointError(f"rank {rank}: {reason}")
    return result  # type: ignore[return-value]


# -- writing ----------------------------------------------------------------------------------------------------------


def _checked(path: str | os.PathLike[str], keep: int, search: bool, parts: Mapping[str, Any]) -> Path:
    """The file. Raises for what cannot be saved, as far as that is seen without a state."""
    must_count(1, "2 keeps the one before", keep=keep)
    rule = "no part's name, since hdet.load has an argument of that name"
    must_be(rule, "ignore" not in parts, "give the part another name", ignore=parts.get("ignore"))
    must_be("True or False", isinstance(search, bool), "leave it out for True", search=search)
    _refuse_sharded_parts(_stateful(parts), _inside(parts, AutoScheduler) if search else {})
    return _resolved(path)


def _resolved(path: str | os.PathLike[str]) -> Path:
    """The path of the file itself, so that a link to it is not replaced. Raises for folders, devices and pipes."""
    given = path_of(path, "path")
    if given.exists() and not given.is_file():
        raise ArgumentError(
            f"path must be the path of a regular file, but {given} is a folder, a device, a pipe or a socket; name a "
            "file in a folder"
        )
    return path_of(os.path.realpath(given), "path")


def _content(parts: Mapping[str, Any], guards: Mapping[str, Any], losses: Mapping[str, Any]) -> dict[str, Any]:
    """What goes into the file. Sharded state is refused once more: some parts only show it now.

    ``guards``: their states; ``losses``: for each search that is saved. Both are of all ranks.
    """
    stateful, found = _stateful(parts), _inside(parts, AutoScheduler)
    states = {name: guards[name] if name in guards else part.state_dict() for name, part in stateful.items()}
    values = {name: value for name, value in parts.items() if name not in stateful}
    for name, value in {**states, **values}.items():
        _refuse_shards(name, leaves(value))
    searches = {name: {**found[name].search_state_dict(), "losses": rows} for name, rows in losses.items()}
    return {"hdet": _FORMAT, "written_by": __version__, "states": states, "values": values, "searches": searches}


def _refuse_sharded_parts(parts: Mapping[str, Any], searches: Mapping[str, AutoScheduler]) -> None:
    """Raise if a part, or one of the searches, holds what one rank has of sharded weights.

    The snapshots of a guard and the sums of a search are plain tensors. The weights that they belong to tell.
    """
    optimizers = {name: scheduler.optimizer for name, scheduler in searches.items()}
    for name, part in (*parts.items(), *optimizers.items()):
        _refuse_shards(name, _tensors_in(part))


def _refuse_shards(name: str, tensors: Iterable[Tensor]) -> None:
    if any(map(is_sharded, tensors)):
        raise ShardedParametersError(
            f"the part {name!r} is sharded over the ranks, and a file of hdet.save has what one rank holds; save the "
            "model, the optimizer and the scheduler with torch.distributed.checkpoint, and what a search or a guard "
            "holds in a file of each rank, by torch.save(scheduler.search_state_dict(), f'search-{rank}.pt') and "
            "torch.save(guard.state_dict(), f'guard-{rank}.pt')"
        )


def _tensors_in(part: Any) -> list[Tensor]:
    """The parameters of a model, of an optimizer or of a guard; none of other parts."""
    if isinstance(part, Guard):
        return [*_tensors_in(part._optimizer), *part._model.buffers()]
    if isinstance(part, Optimizer):
        return [p for group in part.param_groups for p in group["params"]]
    return list(part.parameters()) if isinstance(part, nn.Module) else []


# -- reading ----------------------------------------------------------------------------------------------------------


def _checked_content(found: Whole, parts: Mapping[str, Any], ignore: Sequence[str]) -> dict[str, Any]:
    """The file's content, if it has a state for each of these parts, and none besides but those to ignore."""
    file = found.file
    _refuse_another(found)
    content = read(file)
    _refuse_another(found)  # torch opens it twice: it may have been replaced meanwhile
    if not isinstance(content, dict) or content.get("hdet") != _FORMAT:
        of = content if isinstance(content, dict) else {}
        raise CheckpointError(version_words(str(file), of.get("hdet"), _FORMAT, of.get("written_by")))
    states, searches = content["states"], content["searches"]
    _refuse_sharded_parts(parts, {k: one for k, one in _inside(parts, AutoScheduler).items() if k in searches})
    for name in parts:
        if name not in states:
            has = f"the states {shown(sorted(states))} and the values {shown(sorted(content['values']))}"
            raise ArgumentError(
                f"{file} has no state of {name!r}: it has {has}; give the parts the names that they were saved with"
            )
    _refuse_missing(file, set(states), parts, ignore)
    return content


def _refuse_missing(file: Path, saved: set[str], parts: Mapping[str, Any], ignore: Sequence[str]) -> None:
    """Raise if a run would go on without one of the parts that were saved. Modules alone are for evaluation."""
    missing = sorted(saved - set(parts))
    fits = isinstance(ignore, (list, tuple, set, frozenset)) and all(is_one_of(name, missing) for name in ignore)
    rule = f"a tuple of names out of {shown(missing)}, which {file} has and the call does not give"
    must_be(rule, fits, "leave it out if nothing is to be ignored", ignore=ignore)
    missing = [name for name in missing if name not in ignore]
    if missing and not all(isinstance(part, nn.Module) for part in parts.values()):
        gives = ", ".join(f"{name}={name}" for name in missing)
        raise ArgumentError(
            f"{file} has a state of {', '.join(map(repr, missing))}, which the call does not give: the run would go on "
            f"without it; give {gives}, or ignore={(*ignore, *missing)!r} if that is meant"
        )


def _refuse_another(found: Whole) -> None:
    """Raise unless this rank sees the file that rank 0 has verified."""
    file = found.file
    if not file.exists() or digest_of(file) != found.digest:
        raise CheckpointError(
            f"{file} is {'another file' if file.exists() else 'not there'} on this rank; all ranks must see rank 0's "
            "file: use a folder that they share, or copy it to every host. If a run has just saved there, load again"
        )


def _backup_of(name: str, part: Any) -> _Backup:
    """What a part is before it is loaded.

    The tensors of guards and searches are not copied, because a load replaces them by others.
    """
    searches = {inside: one.search_state_dict() for inside, one in _inside({name: part}, AutoScheduler).items()}
    attributes = {inside: set(vars(one)) for inside, one in _inside({name: part}, LRScheduler).items()}
    return part.state_dict() if isinstance(part, Guard) else _copied(part.state_dict()), searches, attributes


def _copied(state: Any) -> Any:
    """A copy, with all tensors on the host: a device may be nearly full."""
    moved = (tensor for tensor in leaves(state) if tensor.device.type not in ("cpu", "meta"))
    return copy.deepcopy(state, {id(tensor): tensor.detach().cpu() for tensor in moved})


def _load_parts(content: Mapping[str, Any], parts: Mapping[str, Any], before: dict[str, _Backup]) -> None:
    """A scheduler after its optimizer, and those of hdet last.

    ``before``: gets what each part was, before any is changed: whether a scheduler's rates are those of its optimizer
    is part of its state.
    """
    in_turn = sorted(parts.items(), key=lambda pair: _turn(pair[1]))
    before.update({name: _backup_of(name, part) for name, part in in_turn})
    for name, part in in_turn:
        with reading(f"the checkpoint's state of {name!r}", "build the parts as they were when they were saved"):
            part.load_state_dict(copy.deepcopy(content["states"][name]))  # out of the file, which will be replaced
        for inside, scheduler in _inside({name: part}, AutoScheduler).items():
            scheduler.load_search_state_dict(content["searches"].get(inside, {}))


def _restore(parts: Mapping[str, Any], before: Mapping[str, _Backup]) -> None:
    """Give all parts the states that they had."""
    for name, (state, searches, attributes) in before.items():
        parts[name].load_state_dict(state)
        for inside, scheduler in _inside({name: parts[name]}, AutoScheduler).items():
            scheduler.load_search_state_dict(searches[inside])
        for inside, one in _inside({name: parts[name]}, LRScheduler).items():  # they take in all that a state has
            for added in set(vars(one)) - attributes[inside]:
                delattr(one, added)


def _turn(part: Any) -> int:
    """The place of a part in the order in which states are loaded."""
    if isinstance(part, (ReplicaScheduler, AutoScheduler, Guard)):
        return 4
    kinds = nn.Module, Optimizer, LRScheduler
    return next((turn for turn, kind in enumerate(kinds, start=1) if isinstance(part, kind)), 0)


# -- parts ------------------------------------------------------------------------------------------------------------


def _stateful(parts: Mapping[str, Any]) -> dict[str, Any]:
    """The parts that have a state; a model without DDP around it, since a checkpoint serves any number of ranks."""
    found = {name: part for name, part in parts.items() if hasattr(part, "load_state_dict")}
    return {name: part.module if isinstance(part, DistributedDataParallel) else part for name, part in found.items()}


def _inside(parts: Mapping[str, Any], kind: type[_Part]) -> dict[str, _Part]:
    """The parts of a kind, also schedulers inside torch's: the second in a SequentialLR ``s`` is ``s[1]``."""
    found = {name: part for name, part in parts.items() if isinstance(part, kind)}
    for name, part in parts.items():
        own = vars(part).values() if isinstance(part, LRScheduler) else ()  # torch has no public name for them
        for some in (one for one in own if isinstance(one, (list, tuple))):
            found |= _inside({f"{name}[{i}]": one for i, one in enumerate(some) if isinstance(one, LRScheduler)}, kind)
    return found
