"""experiments/real_ablation.py: constants are changed and put back, variants are kept, the table says what it says."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import real_ablation as ablation
import real_lr
import real_table
from real_ablation import AS_IT_IS, VARIANTS, changed, lines_of, markdown

from hdet.algorithm.auto import constants as c
from hdet.algorithm.auto.evidence import Evidence
from hdet.algorithm.auto.pilot import Action, Phase, Pilot, PilotState
from hdet.algorithm.auto.rounds import Growing
from tests.experiments.small_tasks import small

TASK = small("digits")
KNOWN: dict[str, Any] = {
    "tiny": SimpleNamespace(
        name="tiny", split="dev", optimizer="adamw", steps=60, customary=1e-2, task=lambda synthetic=False: TASK
    )
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The file of real_lr.py, as text."""
    folder = tmp_path_factory.mktemp("real")
    plan, _ = real_lr.parsed(["--quick", "--rows", "onecycle", "--results", str(folder)], KNOWN)
    return real_lr.run_workload(plan, KNOWN["tiny"]).path.read_text()


@pytest.fixture
def folder(tmp_path: Path, measured: str) -> Path:
    (tmp_path / "tiny.json").write_text(measured)
    return tmp_path


def run(folder: Path, *words: str) -> dict[str, Any]:
    plan, given = ablation.asked(["--quick", "--results", str(folder), *words], KNOWN)
    path = ablation.run_workload(plan, KNOWN["tiny"], given.variants).path
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_constants_are_put_back() -> None:
    was, ends = {name: getattr(c, name) for name in dir(c)}, Growing(100).ends
    for values in VARIANTS.values():
        with pytest.raises(RuntimeError), changed(values):
            assert all(getattr(c, name) == value for name, value in values.items())
            raise RuntimeError
        assert {name: getattr(c, name) for name in dir(c)} == was
        assert Growing(100).ends == ends
    with changed(VARIANTS["SHORT=4"]):
        assert Growing(100).ends[:3] == (1, 5, 9)
    with pytest.raises(AttributeError), changed({"NO_SUCH_NUMBER": 1.0}):
        pass


def test_every_variant_but_one_changes_something() -> None:
    for name, values in VARIANTS.items():
        assert (values == {}) == (name == AS_IT_IS)
        assert all(getattr(c, constant) != value for constant, value in values.items() if constant != "RUINED")


def test_what_variants_switch_off() -> None:
    state = PilotState(Phase.SEARCHING, level=0.0, first=1.0)
    asking = Evidence((9, 11), 1.0, 1.0, reach=9.0, displacement=1e-3)
    ruined = Evidence((9, 11), 5.0, 1.0, displacement=1e-3)
    long = Evidence((0, 1), 1.0, displacement=0.5)
    pilot = Pilot(100)
    assert pilot.after_round(state, asking).state.level > 0
    assert pilot.after_round(state, ruined).action is Action.GO_ON
    assert pilot.after_round(pilot.begin(), long).action is Action.RESTART
    with changed(VARIANTS["never raised"]):
        assert pilot.after_round(state, asking).state.level == 0
    with changed(VARIANTS["never too hot"]):
        assert pilot.after_round(state, ruined).action is Action.KEEP
        assert pilot.after_round(state, ruined._replace(now=math.nan)).action is Action.NOTHING
    with changed(VARIANTS["never restarted"]):
        assert pilot.after_round(pilot.begin(), long).action is Action.KEEP


def test_variants_are_kept_and_not_run_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    variants = f"{AS_IT_IS},LEAST_RISE=1,HEED=1,never raised"
    there = run(folder, "--variants", variants)
    assert list(there["rows"]) == variants.split(",")
    assert [cell["start"] for cell in there["rows"]["HEED=1"]["starts"]] == [1e-3, 100.0]
    assert all(len(curve) == 1 for row in there["rows"].values() for cell in row["starts"] for curve in cell["curves"])
    found = {name: [cell["found"] for cell in row["starts"]] for name, row in there["rows"].items()}
    assert len({str(rates) for rates in found.values()}) == 4  # each variant has done something
    assert max(found["never raised"][0]) < min(found[AS_IT_IS][0])
    assert "tiny 1/4 as it is" in capsys.readouterr().out
    run(folder, "--variants", AS_IT_IS)
    assert "as it is" not in capsys.readouterr().out
    again = run(folder, "--variants", AS_IT_IS, "--again")
    assert "tiny 1/1 as it is" in capsys.readouterr().out
    assert again["rows"][AS_IT_IS]["starts"] == there["rows"][AS_IT_IS]["starts"]
    assert not real_table.read(folder, "test")
    assert [table.name for table in real_table.read(folder, "dev")] == ["tiny"]  # a file of variants is none of these


def test_as_it_is_is_the_row_of_the_table(folder: Path) -> None:
    plan, _ = real_lr.parsed(["--quick", "--rows", "auto", "--results", str(folder)], KNOWN)
    plan.few = ablation.STARTS
    content = json.loads((folder / "tiny.json").read_text())
    bench = real_lr.Workbench(plan, KNOWN["tiny"]).scoring
    row = ablation.auto(bench, ablation.Best(content["best"]["rate"], None), (), ablation.STARTS, ["auto"])["auto"]
    mine = ablation.run_variant(bench, content["best"]["rate"], AS_IT_IS)
    assert not isinstance(row, str)
    assert mine.curves == row.curves


def test_no_time_no_variant(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, given = ablation.asked(["--quick", "--results", str(folder)], KNOWN)
    plan.until = 0.0
    assert not ablation.run_workload(plan, KNOWN["tiny"], given.variants).content["rows"]
    assert "no time left for as it is, HEED=0.35" in capsys.readouterr().out


def test_real_lr_comes_first(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"Run first: .*real_lr.py --workloads tiny --rows onecycle"):
        run(tmp_path)


def test_options() -> None:
    plan, given = ablation.asked(["--seconds", "9", "--processes", "4"])
    assert set(plan.workloads) == set(ablation.SHORT)
    assert (given.processes, len(plan.seeds), given.variants) == (4, 3, list(VARIANTS))
    assert len(ablation.asked(["--workloads", "dev"])[0].workloads) == 6
    assert len(ablation.asked(["--workloads", "dev,seen"])[0].workloads) == 12
    with pytest.raises(SystemExit):
        ablation.asked(["--variants", "HEED=7"])


def test_test_is_not_for_tuning(capsys: pytest.CaptureFixture[str]) -> None:
    held = {"held": SimpleNamespace(**{**vars(KNOWN["tiny"]), "name": "held", "split": "test"})}
    with pytest.raises(SystemExit):
        ablation.asked(["--workloads", "held", "--log", "why"], held)
    assert "for judging, but got held; take dev or kin" in capsys.readouterr().err


def test_table_by_hand() -> None:
    runs = [("tiny", start, seed) for start in ablation.STARTS for seed in range(2)]
    found = {
        AS_IT_IS: dict.fromkeys(runs, 0.0),
        "better": dict.fromkeys(runs, -0.1),
        "worse": dict(zip(runs, (0.1, 0.2, 0.1, 0.2), strict=True)),
        "noise": dict(zip(runs, (-0.5, 0.5, -0.5, 0.6), strict=True)),
    }
    lines = {line.name: line for line in lines_of(found)}
    assert list(lines) == ["better", AS_IT_IS, "noise", "worse"]
    assert [line.mark for line in lines.values()] == ["better", "", "", "worse"]
    assert lines["worse"].error == pytest.approx(0.0577 / 2, rel=1e-3)
    assert lines["noise"].worst == pytest.approx(math.exp(0.6))
    assert "| worse | 1.162 | 1.22 | 4 | +0.1500 | 0.0289 | worse |" in markdown(lines_of(found))


def test_cells_of_a_file(folder: Path) -> None:
    known = ablation.Reference(0.1, 2.0, [0.5, 1.0])
    row = {"starts": [{"start": 100.0, "curves": [[1.0], [None]]}]}
    cells = ablation.cells({"workload": "tiny", "rows": {AS_IT_IS: row}}, known)
    assert cells == {AS_IT_IS: {("tiny", 100.0, 0): math.log(2), ("tiny", 100.0, 1): math.log(2)}}
    dense = ablation.cells({"workload": "tiny", "density": True, "rows": {AS_IT_IS: row}}, known._replace(initial=9.0))
    assert dense[AS_IT_IS]["tiny", 100.0, 0] == pytest.approx(1 - math.log(0.5))
    run(folder, "--variants", AS_IT_IS)
    assert len(ablation.read(folder, ["tiny", "other"])[AS_IT_IS]) == 2
