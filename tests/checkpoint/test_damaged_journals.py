"""Damaged journals: whoever reads them says so, and never fails in another way."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import hdet
from hdet.report.data import load_run
from hdet.report.series import run_figures
from hdet.report.verdict import advice, table_of, verdict
from tests.report.made_up import a_header, a_round

RECORDS = [a_header(total_steps=40), *(a_round(k) for k in range(4))]


def written(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records))
    return path


def read_by_everybody(path: Path) -> list[str]:
    """What each says that refuses it."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    said = []
    for reader in (
        hdet.read_journal,
        lambda file: hdet.schedule_from(file, optimizer),
        lambda file: verdict(load_run(file)),
    ):
        try:
            reader(path)
        except hdet.HdetError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize(("line", "field"), [(2, "step"), (2, "round"), (4, "kind")])
@pytest.mark.parametrize("value", [1.5, [], None, True])
def test_the_line_is_named(tmp_path: Path, line: int, field: str, value: Any) -> None:
    records = copy.deepcopy(RECORDS)
    records[line - 1][field] = value
    said = read_by_everybody(written(tmp_path / "run.jsonl", records))
    assert len(said) == 3
    assert all(f"line {line} is not a record" in text for text in said)


@pytest.mark.parametrize("field", ["base", "base_before", "step"])
def test_a_field_that_is_missing_is_named(tmp_path: Path, field: str) -> None:
    records = copy.deepcopy(RECORDS)
    del records[3][field]
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(hdet.ArgumentError, match=rf"the journal does not fit .*'{field}'.*; it is damaged"):
        hdet.schedule_from(written(tmp_path / "run.jsonl", records), optimizer)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_fields_missing_at_random(tmp_path: Path, data: st.DataObject) -> None:
    records = copy.deepcopy(RECORDS)
    target: Any = records[data.draw(st.integers(0, len(records) - 1))]
    while True:
        keys = list(target) if isinstance(target, dict) else list(range(len(target)))
        key = data.draw(st.sampled_from(keys))
        inside = target[key]
        if not (isinstance(inside, (dict, list)) and inside and data.draw(st.booleans())):
            break
        target = inside
    del target[key]
    assert all(";" in text for text in read_by_everybody(written(tmp_path / "run.jsonl", records)))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_bits_flipped_at_random(tmp_path: Path, place: float, bit: int) -> None:
    path = written(tmp_path / "run.jsonl", RECORDS)
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1 << bit
    path.write_bytes(content)
    assert all(";" in text for text in read_by_everybody(path))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), value=st.sampled_from([None, True, -1, 1.5, 10**400, "", "x", [], ["x"], {}, {"a": 1}]))
def test_values_replaced_at_random(tmp_path: Path, data: st.DataObject, value: Any) -> None:
    """Whatever reads them accepts them or says that the journal is damaged."""
    records = copy.deepcopy(RECORDS)
    target = data.draw(st.sampled_from(records))
    target[data.draw(st.sampled_from(sorted({*target, "status", "why", "event", "total_steps"})))] = value
    path = written(tmp_path / "run.jsonl", records)
    assert all(";" in text for text in read_by_everybody(path))
    try:
        run = load_run(path)
    except hdet.HdetError:
        return
    assert [advice(run), run.alarms, table_of([run]).rows, run_figures(run)]
