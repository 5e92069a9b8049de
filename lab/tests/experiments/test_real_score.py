"""lab/experiments/real/score.py and real_table.py, on curves whose scores are known by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import real_table
from real.score import TUNED, Summary, Table, area, near, pair, profile, ratios, slowdowns, summary, table_of
from real.targets import Duel, check_table, checks

STEPS = [10, 20, 30, 40]


def table(name: str = "one", **methods: dict[float | None, list[list[float]]]) -> Table:
    tuned = {1.0: [[4.0, 3.0, 2.0, 1.0], [4.0, 3.0, 2.0, 1.0]]}  # the target is 1.05
    labels = {method: method for method in (TUNED, *methods)}
    return Table(name, "dev", STEPS, 5.0, {TUNED: tuned, **methods}, labels, {})


def content(split: str = "dev") -> dict[str, Any]:
    """As a file has it."""

    def row(cells: dict[float | None, list[list[float | None]]]) -> dict[str, Any]:
        starts = [{"start": start, "curves": rows, "found": [0.02, 0.05]} for start, rows in cells.items()]
        return {"starts": starts}

    tuned = [[4.0, 3.0, 2.0, 1.0], [4.0, 3.0, 2.0, 1.0]]
    failed: list[list[float | None]] = [[4.0, None, None, None], [4.0, 4.5, 4.5, 4.5]]
    return {
        "workload": f"made {split}",
        "split": split,
        "evaluated": STEPS,
        "initial": 5.0,
        "best": {"rate": 0.01},
        "rows": {
            "onecycle": row({0.01: tuned, 1.0: tuned, 100.0: failed}),
            "auto": row({1e-3: [[4.0, 1.0, 1.0, 0.9], [4.0, 3.0, 1.0, 0.9]], 100.0: tuned}),
            "dog": row({None: failed}),
        },
    }


def test_slowdowns_by_hand() -> None:
    fast = {None: [[2.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0]]}  # at the target after 20 steps, and never
    away = {0.1: [[9.0, 9.0, 9.0, 1.05], [1.0, 9.0, 9.0, 9.0]]}  # after 40, and after 10 for a moment
    found = slowdowns([table(fast=fast, away=away)])
    assert found == {TUNED: [2.0, 4.0], "fast": [1.0, math.inf], "away": [2.0, 1.0]}
    assert [profile(found[TUNED], tau) for tau in (1, 2, 3.9, 4)] == [0.0, 0.5, 0.5, 1.0]
    assert area(found[TUNED]) == pytest.approx((2 / 3 + 0) / 2)
    assert area(found["fast"]) == 0.5
    assert area(found["away"]) == pytest.approx((2 / 3 + 1) / 2)


def test_where_nobody_arrives_nobody_scores() -> None:
    never = {None: [[9.0] * 4] * 2}
    one = table(other=never)
    one.methods[TUNED] = {
        1.0: [[4.0, 3.0, 2.0, 1.0], [9.0, 9.0, 9.0, 9.0]]
    }  # the target is 5.25, the second run misses
    assert slowdowns([one]) == {TUNED: [1.0, math.inf], "other": [math.inf, math.inf]}


def test_final_losses_by_hand() -> None:
    ours = {1e-3: [[9.0, 9.0, 9.0, 2.0], [9.0, 9.0, 9.0, 2.0]], 100.0: [[math.inf] * 4, [9.0, 9.0, 9.0, 1.0]]}
    one = table(ours=ours)
    assert ratios(one, "ours") == {1e-3: 2.0, 100.0: 3.0}  # a failed run has the loss of the beginning, 5
    found = summary([one], "ours", slowdowns([one])["ours"])
    assert found.ratio == pytest.approx(math.sqrt(6))
    assert found.worst == 3.0
    assert found.sensitivity == pytest.approx(1.5)
    assert found.spread == pytest.approx((0 + math.sqrt(8) / 3) / 2)
    assert (found.failed, found.runs, found.reached, found.near) == (1, 4, 0.25, 0.25)
    assert summary([one], TUNED, [1.0, 1.0]).sensitivity is None


def test_near_is_by_the_rate_or_by_the_loss() -> None:
    worse, as_good = [9.0, 9.0, 9.0, 1.02], [9.0, 9.0, 9.0, 1.01]
    one = table(ours={1.0: [worse, as_good], 100.0: [worse, worse]})
    assert near(one, "ours") == [False, True, False, False]
    rates = {1.0: [2.0, 99.0], 100.0: [0.49, 0.5]}
    assert near(one._replace(found={"ours": rates}), "ours") == [True, True, False, True]
    assert near(one, TUNED) == [True, True]


def test_densities_are_scored_by_their_exponentials() -> None:
    """Losses of 0 and below: 0.05 nats are 5 %."""
    made = content()
    made["density"], made["initial"] = True, 0.5
    curves = [[0.4, 0.0, -2.0, -3.0]] * 2
    made["rows"]["onecycle"]["starts"] = [{"start": 1.0, "curves": curves, "found": [0.01] * 2}]
    made["rows"]["auto"]["starts"] = [
        {"start": 1.0, "curves": [[0.4, 0.0, -2.96, -2.94], [None] * 4], "found": [0.01] * 2}
    ]
    found = table_of(made)
    assert found.initial == pytest.approx(math.exp(0.5))
    assert ratios(found, "auto")[1.0] == pytest.approx((math.exp(0.06) + math.exp(3.5)) / 2)
    assert slowdowns([found])["auto"] == [1.0, math.inf]  # at the target after 30 steps, as exp(0.04) < 1.05
    assert slowdowns([found])[TUNED] == [pytest.approx(4 / 3), 1.0]


def test_targets_are_met_or_missed() -> None:
    def one(ratio: float, worst: float = 1.1, area: float = 0.5, near: float = 0.9) -> Summary:
        return Summary(area, ratio, worst, None, 0.0, 1.0, near, 0, 3)

    good = {"auto": one(1.02), "auto-alone": one(1.1), "placebo": one(1.5, 1.0, 0.9), "onecycle": one(0.5, 0.5, 1.0)}
    good |= {TUNED: one(1.0, 1.0, 0.9), "schedulefree-tuned": one(0.9, 0.9, 0.9), "dog": one(1.2, 1.2, 0.4)}
    splits = {"seen": good, "dev": {"auto": one(1.0, near=0.7)}, "kin": good}
    beside = {"seen": {"dog": Duel(good["auto"], good["dog"])}}
    found = checks(splits, {"sorting": {1.0: 2.0, 1e-3: 4.0}}, beside)
    missed = [(check.split, check.what) for check in found if not check.met]
    assert missed == [
        ("dev", "mean"),
        ("dev", "runs near the best rate or its loss"),
        ("apart", "sorting, the worst start"),
    ]
    assert len([check for check in found if check.split == "seen"]) == 8
    bad = {**good, "auto": one(1.04, 1.3, 0.3, 0.7), "auto-alone": one(1.2), "placebo": one(1.2)}
    beside["seen"] = {name: Duel(bad["auto"], peer) for name, peer in (("dog", good["dog"]), ("momo", one(1.01)))}
    by_name = {check.what: check for check in checks({"seen": bad}, {}, beside)}
    assert not any(check.met for check in by_name.values())
    assert by_name["ahead of untuned peers in mean"].found == "not of momo"
    assert by_name["ahead of untuned peers in worst"].found == "not of dog, momo"
    assert "| seen | worst | 1.300 | at most 1.15 | MISS |" in check_table(list(by_name.values()))


def test_a_peer_that_left_out_a_workload_is_compared_on_the_others() -> None:
    """It is ahead on the one that it has run, though our mean over both is better than its own."""
    ran, left_out = table_of(content()), table_of(content())._replace(name="other")
    ahead = {1.0: [[4.0, 2.0, 0.5, 0.25]] * 2}
    ran = ran._replace(methods={**ran.methods, "momo": ahead}, labels={**ran.labels, "momo": "MoMo"})
    found = real_table.duels([ran, left_out])["momo"]
    assert found.ours.runs == real_table.summaries([ran])["auto"].runs
    assert found.peer.ratio < found.ours.ratio


def test_two_methods_are_compared_on_the_workloads_that_both_have() -> None:
    """Ours ends at 1 and 4 times the tuned loss, theirs at 2 each; a third workload has only ours."""

    def ended(*losses: float) -> dict[float | None, list[list[float]]]:
        return {float(n): [[4.0, 3.0, 2.0, loss]] * 2 for n, loss in enumerate(losses)}

    tables = [table("a", auto=ended(0.5, 2.0), momo=ended(2.0)), table("b", auto=ended(4.0, 4.0), momo=ended(2.0))]
    found = pair([*tables, table("c", auto=ended(4.5))], "auto", "momo")
    assert (found.workloads, found.ahead, found.worst) == (2, 1, 2.0)
    assert (found.ours, found.theirs, found.ratio) == pytest.approx((2.0, 2.0, 1.0))
    assert found.interval == pytest.approx((0.5, 2.0))  # a quarter of all draws are one workload twice


def test_the_readmes_table_has_ours_by_split_and_others_on_test() -> None:
    """The tuned loss is 1. Theirs ends at 1, 2 and 4 on test and at 4 elsewhere; from two starts of ours at 1 and 4."""

    def ended(*losses: float) -> dict[float | None, list[list[float]]]:
        return {float(n): [[9.0, 9.0, 9.0, loss]] * 2 for n, loss in enumerate(losses)}

    tests = [table(name, auto=ended(1.0, 4.0), finder=ended(loss)) for name, loss in (("a", 1), ("b", 2), ("c", 4))]
    dev = table("d", auto=ended(1.05, 1.05), finder=ended(4.0))
    lines = real_table.front({"dev": [dev], "seen": [], "test": tests, "kin": []}).splitlines()[2:]
    cells = {line.split(" | ")[0]: line.split(" | ")[1:5] for line in lines}
    ours = [
        cells[f"| **`hdet.auto`** on {which}"]
        for which in (
            "3 tasks that were not used to design it (*test*)",
            "1 that were (*dev*, *seen*)",
            "all 4, with variants of *dev* (*kin*)",
        )
    ]
    assert ours[0] == ["2.00", "2.00", "0 of 3", "4.00"]
    assert ours[1] == ["1.05", "1.05", "1 of 1", "1.05"]
    assert ours[2][1:] == ["2.00", "1 of 4", "4.00"]
    theirs = next(line for line in lines if line.startswith("| a range test, then OneCycle at its suggestion"))
    assert "| 2.00 | 2.00 | 1 of 3 | 4.00 |" in theirs
    assert theirs.endswith("| 2 of 4 |")  # ours is lower on c and d, equal on b


def test_a_page_for_those_who_come_from_another_method_says_where_each_is_ahead() -> None:
    def ended(loss: float) -> dict[float | None, list[list[float]]]:
        return {1.0: [[4.0, 3.0, 2.0, loss]] * 2}

    tables = [table("a", auto=ended(1.0), momo=ended(2.0)), table("b", auto=ended(2.0), momo=ended(1.0))]
    made = real_table.versus([*tables, table("c", auto=ended(1.0))], ["momo"], extremes=1)
    assert "| momo | 2 | 1.41 | 2.00 | 1.41 | 1 |" in made
    assert "momo: beats hdet most on b (1.00, hdet 2.00); loses most on a (2.00, hdet 1.00)." in made


def test_sorting_is_in_no_mean(tmp_path: Path) -> None:
    for name, loss in (("sorting", 4.0), ("other", 2.0)):
        made = content("kin")
        made["workload"] = name
        made["rows"]["auto"]["starts"][0]["curves"] = [[4.0, 4.0, 4.0, loss]] * 2
        (tmp_path / f"{name}.json").write_text(json.dumps(made))
    page = real_table.page(tmp_path, tmp_path, ["kin"])
    assert "## Kin: 1 workloads" in page
    assert "| auto | 1.414 | 2.00 |" in page  # from two starts, 2 and 1
    assert "| apart | sorting, the worst start | 4.000 | at most 2 | MISS |" in page
    assert "| auto, from x0.001 | 2.000 | 4.000 |" in page
    compact = real_table.page(tmp_path, tmp_path, ["kin"], compact=True)
    assert "| other | 2.00/1.00 |" in compact
    assert "| sorting | 4.00/1.00 |" in compact
    assert "from x" not in compact
    assert "0 of 1 are met. Missed: apart, sorting, the worst start: 4.000 (at most 2)." in compact


def test_tables_and_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for split in ("dev", "kin", "seen", "test"):
        (tmp_path / f"{split}.json").write_text(json.dumps(content(split)))
    found = real_table.summaries(real_table.read(tmp_path, "dev"))
    # auto is at the target after 20 and 30 steps from one start, after 40 and 40 from the other; tuned after 40.
    assert found["auto"].area == pytest.approx((1 + 1 + 2 / 3 + (4 - 4 / 3) / 3) / 4)
    assert found[TUNED].area == pytest.approx((2 / 3 + (4 - 4 / 3) / 3) / 2)
    assert found["dog"].area == 0
    lines = real_table.lines_of(real_table.read(tmp_path, "dev"))
    assert [line.label for line in lines] == ["auto", "OneCycle, tuned", "DoG, averaged (SGD)"]
    assert [line.ours for line in lines] == [True, False, False]
    monkeypatch.setattr("sys.argv", ["real_table.py", "--results", str(tmp_path), "--images", str(tmp_path / "images")])
    real_table.main()
    out = capsys.readouterr().out
    assert out.index("## Test: 1 workloads") < out.index("## Seen: 1 workloads") < out.index("## Dev: 1 workloads")
    assert "Kin" not in out
    assert "| auto, from x0.001 | 0.900 |" in out
    assert "| auto, from x100 | 2 to 5 |" in out
    assert "| dev | mean | 0.949 | at most 0.99 | PASS |" in out
    assert "| auto | 0.949 | 1.00 | 0.889 | 100% | 100% |" in out
    assert "| **`hdet.auto`** on 2 that were (*dev*, *seen*) | 0.95 | 0.95 | 2 of 2 | 1.00 | | |" in out
    assert (tmp_path / "images" / "real_profile_dev.svg").read_text().startswith("<?xml")
    monkeypatch.setattr(
        "sys.argv", ["real_table.py", "--results", str(tmp_path), "--images", str(tmp_path), "--split", "kin"]
    )
    real_table.main()
    out = capsys.readouterr().out
    assert out.startswith("## Kin: 1 workloads")
    assert "Dev" not in out
