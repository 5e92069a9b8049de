"""lab/benchmarks/scale.py: the model's figures by hand, the stored ones, and small measurements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import scale
from tests.examples.launch import ROOT

STORED = json.loads((ROOT / "lab" / "benchmarks" / "results" / "scale.json").read_text())


def test_the_model_by_hand() -> None:
    """1e9 weights in fp32 are 4 GB: 8 replicas send 7/4 of it each, in 239 buckets of 16 MiB, 6 hops of 10 us each."""
    eight, _, thousand = scale.calculated()
    assert eight["sent_gb"] == {"shared": 7.0, "arms": 21.0}
    assert thousand["sent_gb"]["shared"] == pytest.approx(8 * 1023 / 1024)
    assert eight["seconds"]["50 GB/s (400 Gb/s)"]["shared"] == pytest.approx(7 / 50 + 239 * 6e-5)
    assert thousand["seconds"]["12.5 GB/s (100 Gb/s)"]["arms"] == pytest.approx(24 * 1023 / 1024 / 12.5 + 716 * 20e-5)
    assert thousand["gathered_kb"] == pytest.approx(73.728)


def test_the_stored_model_is_that_of_the_script() -> None:
    assert STORED["calculated"] == scale.calculated()


def test_what_was_measured_holds_what_the_page_says() -> None:
    thousand = STORED["host"][-1]
    assert thousand["replicas"] == 1024
    assert thousand["balanced_2"] <= 10
    for row in STORED["gloo"]:
        for own in (row["shared"], row["arms"]):
            assert own["copies_sent"] == pytest.approx(own["copies_calculated"], rel=0.01)


def test_real_ranks_send_what_is_calculated() -> None:
    row = scale.gloo(2, 300_000, 3)
    for name, copies in (("shared", 2), ("arms", 6)):
        assert row[name]["copies_calculated"] == copies
        assert row[name]["seconds"] > 0
        sent = row[name]["copies_sent"]
        if sent is not None:  # the machine says what it sends to itself; other programs only add
            assert 0.99 * copies < sent


def test_small_measurements_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "gloo", lambda *given: {"ranks": given[0]})  # measured above
    path = tmp_path / "deep" / "scale.json"
    scale.main(["--replicas", "3", "--repetitions", "1", "--weights", "1000", "--write", str(path)])
    found = json.loads(path.read_text())
    (host,) = found["host"]
    assert host["replicas"] == 3
    assert all(value >= 0 for value in host.values())
    assert host["line_kb"] > 0.5
    assert host["lists_kb"] > 0
    assert found["stacked"][0]["ms"] >= 0


def test_a_single_replica_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        scale.main(["--replicas", "1"])
    assert "at least 2" in capsys.readouterr().err
