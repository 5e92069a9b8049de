"""The replica group, on real processes."""

from __future__ import annotations

import atexit
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
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


@pytest.mark.parametrize("dim", [None, "c", 2, -1, 3.5, True, [0.0], [[0]], (0, 0), ("a", 0), torch.tensor(0)])
def test_what_is_no_dimension_of_a_mesh_is_refused(dim: Any) -> None:
    mesh: Any = SimpleNamespace(mesh=torch.tensor([[0]]), mesh_dim_names=("a", "b"))
    assert [hdet.arms(mesh, known).members for known in ("a", 1, ["b"], ("b", "a"))] == [[[0]]] * 4
    with pytest.raises(hdet.ArgumentError, match=r"dim must be .*the mesh has \('a', 'b'\)"):
        hdet.arms(mesh, dim)


def _arm_patience(rank: int) -> float:
    group = hdet.arms(2).gradients
    assert group is not None
    return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())


def test_the_group_of_an_arm_is_as_patient_as_its_parent() -> None:
    assert run_ranks(_arm_patience, 2, group_timeout=17) == [17.0, 17.0]
