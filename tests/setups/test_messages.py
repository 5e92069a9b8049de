"""Arguments that are nearly right: the message has the line to write instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hdet
from tests.setups.problems import network


def cure(**arguments: Any) -> str:
    """What building an Ensemble says."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=0.1)
    before = float(optimizer.param_groups[0]["lr"])
    made = {name: value(model, optimizer) if callable(value) else value for name, value in arguments.items()}
    with pytest.raises(hdet.ArgumentError) as error:
        hdet.Ensemble(optimizer, **made)
    assert float(optimizer.param_groups[0]["lr"]) == before
    return str(error.value)


def test_one_knob_that_is_not_in_a_list() -> None:
    message = cure(knobs=lambda _, optimizer: hdet.knobs.optimizer(optimizer, "weight_decay", spread=0.3))
    assert "knobs=[" in message


def test_sync_every_auto_where_replicas_train() -> None:
    message = cure(sync_every="auto")
    assert "sync_every" in message
    assert "leave it out" in message or any(digit in message for digit in "123456789")


def test_sync_every_auto_in_a_trained_one_cycle() -> None:
    optimizer = torch.optim.Adam(network().parameters(), lr=1e-3)
    with pytest.raises(hdet.ArgumentError, match="sync_every") as error:
        hdet.OneCycleLR(optimizer, 0.1, total_steps=100, sync_every="auto")
    assert "leave it out" in str(error.value) or "for instance" in str(error.value)


@pytest.mark.parametrize("arguments", [{"sync_every": 20}, {"start": 30}, {"controller": hdet.Normalised()}])
def test_what_only_replicas_that_train_have(arguments: dict[str, Any]) -> None:
    message = cure(fanout="probed", probe=lambda model, _: probe_of(model), total_steps=100, **arguments)
    assert "probed" in message
    assert "leave it out" in message


@pytest.mark.parametrize(
    "arguments", [{"sync_every": 20}, {"auto_lr_start": 30}, {"spread": 0.1}, {"auto_lr": hdet.Normalised()}]
)
def test_what_only_a_trained_one_cycle_has(arguments: dict[str, Any]) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with pytest.raises(hdet.ArgumentError, match=next(iter(arguments))) as error:
        hdet.OneCycleLR(optimizer, "auto", total_steps=100, **arguments)
    assert "probed" in str(error.value)


@pytest.mark.parametrize("face", ["OneCycleLR", "Ensemble"])
def test_a_signal_where_a_probe_is_wanted(face: str) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    signal = getattr(hdet, "ProbeLoss", getattr(hdet, "Probe", None))(probe_of(model))
    with pytest.raises(hdet.ArgumentError, match="probe=") as error:
        if face == "OneCycleLR":
            hdet.OneCycleLR(optimizer, "auto", total_steps=100, probe=signal)
        else:
            hdet.Ensemble(optimizer, fanout="probed", probe=signal, total_steps=100)
    assert type(signal).__name__ in str(error.value)
    assert "probe=fn" in str(error.value)


def test_the_signal_is_called_probe_loss() -> None:
    """``Probe`` was its name: next to ``probe=`` and ``ProbeBatch`` it was mistaken for them."""
    assert "ProbeLoss" in hdet.__all__
    assert "Probe" not in hdet.__all__
