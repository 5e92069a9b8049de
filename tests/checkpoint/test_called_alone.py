"""A call that only one rank makes, before the ranks have ever met: the time-out names the call and who is missing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import hdet
from tests.models import two_layer
from tests.processes import error_of, run_ranks

CALLS: dict[str, Any] = {
    "exists": hdet.exists,
    "save": lambda path: hdet.save(path, model=two_layer()),
    "load": lambda path: hdet.load(path, model=two_layer()),
}


def _alone(rank: int, call: str, path: str) -> tuple[str, str]:
    if rank != 1:
        time.sleep(4)  # longer than the other waits
        return "", ""
    error = error_of(lambda: CALLS[call](path))
    return type(error).__name__, str(error)


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_a_call_on_one_rank_alone_is_named_with_the_missing_ranks(call: str, tmp_path: Path) -> None:
    path = str(tmp_path / "run.pt")
    kind, words = run_ranks(_alone, 3, call, path, group_timeout=2)[1]
    assert kind == "LostReplicaError"
    assert f"a collective failed in hdet.{call}({path!r})" in words
    assert "Missing ranks:\n  rank 0: never seen\n  rank 2: never seen" in words
    assert "hdet.exists() equally often" in words


def _one_after_the_other(rank: int, path: str) -> tuple[str, str]:
    hdet.save(path, model=two_layer())
    if rank == 1:
        time.sleep(4)
        return "", ""
    error = error_of(lambda: hdet.exists(path))
    return type(error).__name__, str(error)


@pytest.mark.slow
def test_a_later_call_on_one_rank_alone_says_where_the_others_were_last(tmp_path: Path) -> None:
    path = str(tmp_path / "run.pt")
    kind, words = run_ranks(_one_after_the_other, 2, path, group_timeout=2)[0]
    assert kind == "LostReplicaError"
    assert f"a collective failed in hdet.exists({path!r})" in words
    assert "rank 1: last seen" in words
    assert f"at hdet.save({path!r})" in words
