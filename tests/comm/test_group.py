"""The replica group, on real processes."""

from __future__ import annotations

import atexit
from unittest import mock

from hdet.comm import group
from tests.ranks import run_ranks


def pauses_at_exit(rank: int) -> int:
    with mock.patch.object(atexit, "register") as register:
        for _ in range(2):
            group.connect(None)
    with mock.patch.object(group.time, "sleep") as sleep:
        for call in register.call_args_list:
            call.args[0]()
    return sleep.call_count


def test_a_program_waits_for_gloos_threads_once_however_many_ensembles_it_had() -> None:
    assert run_ranks(pauses_at_exit, 2) == [1, 1]
