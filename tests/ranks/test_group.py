"""The replica group, on real processes."""

from __future__ import annotations

import atexit
from unittest import mock

import torch

import hdet
from hdet.ranks import group
from tests.processes import run_ranks


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


def _arm_patience(rank: int) -> float:
    group = hdet.arms(2).gradients
    assert group is not None
    return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())


def test_the_group_of_an_arm_is_as_patient_as_its_parent() -> None:
    assert run_ranks(_arm_patience, 2, group_timeout=17) == [17.0, 17.0]
