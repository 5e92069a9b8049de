"""lab/benchmarks/scale.py: the model's figures by hand, the stored ones, and small measurements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import scale
from tests.examples.launch import ROOT

STORED = json.loads((ROOT / "lab" / "benchmarks" / "results" / "scale.json").read_text())


def test_the_model_by_hand() -> None:
    """1e9 weights in fp32 are 4 GB: 8 ranks send 7/4 of it each, in 239 buckets of 16 MiB, 6 hops of 10 us each."""
    eight, _, thousand = scale.calculated()
    assert eight["sent_gb"] == {"shared": 7.0, "arms": 21.0}
    assert thousand["sent_gb"]["shared"] == pytest.approx(8 * 1023 / 1024)
    assert eight["hops_s"]["shared"] == pytest.approx(239 * 6e-5)
    assert eight["seconds"]["50 GB/s"]["shared"] == pytest.approx(7 / 50 + 239 * 6e-5)
    assert thousand["seconds"]["12.5 GB/s"]["arms"] == pytest.approx(24 * 1023 / 1024 / 12.5 + 716 * 20e-5)
    assert thousand["gathered_kb"] == pytest.approx(73.728)
    assert thousand["gather_s"] == pytest.approx(0.01023)


def test_the_stored_model_is_that_of_the_script() -> None:
    assert STORED["calculated"] == scale.calculated()


def test_anyone_can_put_in_their_own_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """4 ranks and 16 MiB, one bucket: 4 hops of 5 us, and 1.5 times the bytes at 100 GB/s."""
    weights = 2**22
    scale.main(["--calculated", "--ranks", "4", "--weights", str(weights), "--bandwidth", "100", "--hop", "5"])
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["calculated"]
    (row,) = found["calculated"]
    assert row["seconds"]["100 GB/s"]["shared"] == pytest.approx(6 * weights / 1e11 + 20e-6)
    assert row["gather_s"] == pytest.approx(15e-6)


def test_what_was_measured_holds_what_the_page_says() -> None:
    thousand = STORED["host"][-1]
    assert thousand["replicas"] == 1024
    assert thousand["balanced_2"]["median"] <= 10
    assert thousand["balanced_4"]["median"] <= 10
    assert thousand["line_kb"] == pytest.approx(267, abs=1)
    assert [(row["ranks"], row["arms"], row["copies_calculated"]) for row in STORED["gloo"]] == [
        (2, 0, 2),
        (2, 2, 6),
        (4, 0, 6),
        (4, 4, 18),
        (4, 2, 18),
    ]
    for row in STORED["gloo"]:
        assert row["copies_sent"] == pytest.approx(row["copies_calculated"], rel=0.01)


@pytest.mark.parametrize(("ranks", "arms", "copies"), [(2, 0, 2), (2, 2, 6), (4, 2, 18)])
def test_real_ranks_send_what_is_calculated(ranks: int, arms: int, copies: int) -> None:
    """An arm of two ranks sends twice: N of the formula counts ranks."""
    row = scale.gloo(ranks, arms, 300_000, 3)
    assert row["copies_calculated"] == copies
    assert row["seconds"] > 0
    sent = row["copies_sent"]
    if sent is not None:  # the machine says what it sends to itself; other programs only add
        assert 0.99 * copies < sent


def test_median_and_the_slowest_of_twenty(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([value for i in range(1, 22) for value in (0.0, i * 1e-3)])
    monkeypatch.setattr(scale.time, "perf_counter", lambda: next(clock))
    found = scale.timed({"work": lambda: None}, 21)["work"]
    assert (found["median"], found["p95"]) == (pytest.approx(11), pytest.approx(20))
    assert found["cpu"] >= 0


def test_small_measurements_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "gloo", lambda *given: {"ranks": given[0]})  # measured above
    path = tmp_path / "deep" / "scale.json"
    scale.main(["--replicas", "3", "--repetitions", "1", "--converged", "1000", "--write", str(path)])
    found = json.loads(path.read_text())
    (host,) = found["host"]
    assert host["replicas"] == 3
    for name in ("balanced_16", "normalised_2", "end_4", "end_1000", "end_1000_arms", "end_4_journal"):
        assert all(value >= 0 for value in host[name].values())
    assert host["line_kb"] > 0.5
    assert host["lists_kb"] > 0
    assert found["stacked"][0]["ms"] >= 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--replicas", "1"], "at least 2"),
        (["--ranks", "8", "1"], "at least 2"),
        (["--weights", "0"], "--weights must be at least 1"),
        (["--hop", "0"], "--hop above 0"),
        (["--bandwidth", "50", "-1"], "--bandwidth and"),
    ],
)
def test_bad_numbers_are_refused(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        scale.main(words)
    assert told in capsys.readouterr().err
