"""lab/experiments/real_lr.py and its rows, on stand-ins: every row runs, is kept, and does what its name says."""

from __future__ import annotations

import json
import math
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import real.peers
import real.rows
import real_lr
import torch
from real.labels import LABELS
from real.optimizers import BUILDERS
from real.peers import PEERS
from real.processes import in_processes, without
from real.rows import ADDED, PASSES, Best, auto, choose, fixed, is_on_edge, peers, published, suggestion, widened
from real.together import run_together
from real.torch_twins import TWINS
from shapes import onecycle
from stacked import TrainStep

from lab.tests.experiments.small_tasks import CUSTOMARY, bench, small


def workload(name: str = "tiny", split: str = "dev", optimizer: str = "adamw", steps: int = 20) -> Any:
    task = small("digits")
    return SimpleNamespace(
        name=name, split=split, optimizer=optimizer, steps=steps, customary=1e-2, task=lambda synthetic=False: task
    )


def plan_of(words: str, known: dict[str, Any], folder: Path) -> real_lr.Plan:
    return real_lr.parsed([*words.split(), "--results", str(folder)], known)[0]


def test_curves_end_at_the_validation_loss() -> None:
    here = bench(steps=20, seeds=(0, 1))
    here.evaluations = 20
    found = fixed(here, Best(1e-2, None), [0.1, 1.0], [], ["onecycle", "customary"])
    stack = here.stack(1)
    step = TrainStep(
        stack, here.update(stack), here.supply.batches, here.rates(stack, [1e-2], onecycle(20)), graph=False
    )
    first, _ = here.train(stack, step)
    assert len(first[0][1]) == 20
    assert found["onecycle"].starts == [0.1, 1.0]
    assert found["onecycle"].curves[1][1] == pytest.approx(first[0][1], rel=1e-9)
    assert found["customary"].curves[0] == found["onecycle"].curves[1]
    assert stack.validation(stack.theta)[1, 0].item() == pytest.approx(first[0][1][-1], rel=1e-9)


def test_grid_is_widened_until_every_seed_has_its_best_inside() -> None:
    here = bench(steps=8, seeds=(0, 1))
    here.customary = 1e-6
    found = choose(here, 3, extensions=2)
    grid = found["grid"]
    assert len(grid["rates"]) == 3 + 2 * ADDED  # on the side of the best, as often as allowed
    assert found["best"]["on_edge"]
    assert is_on_edge(grid)
    assert all(b / a == pytest.approx(2) for a, b in pairwise(grid["rates"]))
    wider = widened(here, found)
    assert not is_on_edge(wider["grid"])
    assert not wider["best"]["on_edge"]
    assert wider["grid"]["rates"][: len(grid["rates"])] == pytest.approx(grid["rates"])
    assert wider["grid"]["losses"][: len(grid["losses"])] == grid["losses"]  # these are not trained again
    assert wider["best"]["rate"] == pytest.approx(min(wider["grid"]["rates"], key=_means(wider["grid"]).__getitem__))
    assert widened(here, wider)["grid"] == wider["grid"]


def _means(grid: dict[str, Any]) -> dict[float, float]:
    return {rate: sum(row) / len(row) for rate, row in zip(grid["rates"], grid["losses"], strict=True)}


def test_range_test_by_hand() -> None:
    rates = 10.0 ** np.linspace(-7, 1, 40)
    falling = [3.0] * 20 + [3.0 - 0.2 * i for i in range(10)] + [1.2 + 100.0 * i for i in range(10)]
    found = suggestion(rates, falling)
    assert found is not None
    assert rates[20] < found <= rates[30]
    assert suggestion(rates, [math.nan] * 40) is None


@pytest.mark.parametrize("optimizer", BUILDERS)
def test_twins_are_the_stack(optimizer: str) -> None:
    """What Mechanic wraps makes the steps of the stack's optimizer."""
    if optimizer == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("a torch without Muon")
    here = bench(optimizer, "text" if optimizer == "muon" else "digits", steps=5, seeds=(0,))
    twin, rate = TWINS[optimizer], CUSTOMARY[optimizer]

    def plain(place: Any) -> Any:
        return real.peers.Scheduled(
            place, lambda p: twin.kind(twin.groups(p, place.stack.layout), lr=rate, **twin.options), shaped=True
        )

    method = real.peers.Method("torch", plain)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PEERS, "plain", method)
        out = run_together(here, [rate], onecycle(5) * 0 + 1, ["plain"])
    assert out.others["plain"][0][0] == pytest.approx(out.own[0][0], rel=1e-3 if optimizer == "muon" else 1e-9)


def test_a_peer_that_raises_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(real.peers.Scheduled):
        def step(self) -> None:
            raise RuntimeError("G is not positive")

    build = lambda place: Broken(place, torch.optim.SGD)  # noqa: E731
    monkeypatch.setitem(PEERS, "broken", real.peers.Method("torch", build))
    out = run_together(bench(steps=4), [1e-2], onecycle(4), ["broken"])
    assert "G is not positive" in out.broken["broken"]
    assert all(math.isnan(loss) for loss in out.others["broken"][0][0])
    assert all(math.isfinite(loss) for loss in out.own[0][0])


@pytest.mark.parametrize("optimizer", BUILDERS)
def test_packages(optimizer: str) -> None:
    """Those that are there run on every optimizer; the others are named."""
    wanted = ["schedulefree", "schedulefree-tuned", *PEERS, "greedy"]
    found = peers(
        bench(optimizer, "text", steps=6, seeds=(0,)), Best(CUSTOMARY[optimizer], 1e-2), [], [0.1, 1.0], wanted
    )
    assert set(found) == set(wanted)
    for name, outcome in found.items():
        if isinstance(outcome, str):
            assert "installed" in outcome or "transformers" in outcome
        else:
            assert not outcome.note, name
            assert all(math.isfinite(loss) for row in outcome.curves for curve in row for loss in curve), name


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
def test_the_seeds_of_a_peer_are_strangers(name: str, optimizer: str) -> None:
    """A seed ends as it does alone, whether its seeds step together or not."""
    if (why := real.peers.missing(PEERS[name].package)) is not None:
        pytest.skip(why)
    both, alone = bench(optimizer, steps=12, seeds=(0, 1)), bench(optimizer, steps=12, seeds=(1,))
    curves = [run_together(here, [], onecycle(12), [name]).others[name][0][-1] for here in (both, alone)]
    assert curves[0] == pytest.approx(curves[1], rel=1e-9)


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("cocob", "parameterfree.COCOB", {}),
        ("radamfree", "schedulefree.RAdamScheduleFree", {"weight_decay": 0.01}),
        ("momo", "momo.MomoAdam", {"weight_decay": 0.01}),
        ("prodigyplus", "prodigyplus.prodigy_plus_schedulefree.ProdigyPlusScheduleFree", {"weight_decay": 0.01}),
    ],
)
def test_a_peer_is_its_package_on_a_plain_model(name: str, kind: str, options: dict[str, float]) -> None:
    module, _, kind = kind.rpartition(".")
    if (why := real.peers.missing(module.partition(".")[0])) is not None:
        pytest.skip(why)
    here = bench(steps=8, seeds=(0,))
    found = run_together(here, [], onecycle(8), [name]).others[name][0][0][-1]
    model = here.task.model(0)
    parameters = [p for group in here.task.groups(model) for p in group["params"]]
    optimizer = getattr(import_module(module), kind)(parameters, **options)
    for t in range(8):
        getattr(optimizer, "train", lambda: None)()
        optimizer.zero_grad()
        loss = here.task.loss(model, here.task.batch(0, t))
        loss.backward()
        optimizer.step(**({"loss": loss} if name == "momo" else {}))
    getattr(optimizer, "eval", lambda: None)()
    stack = here.stack(1)
    stack.theta[0, 0] = torch.cat([p.detach().flatten() for p in parameters])
    assert found == pytest.approx(stack.validation(stack.theta).item(), rel=1e-4)


def test_every_row_has_a_label() -> None:
    rows = [name for one in PASSES for name in one.rows]
    assert sorted(rows) == sorted(LABELS)


def test_missing_packages_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real.peers, "find_spec", lambda name: None)
    found = peers(bench(steps=4), Best(1e-2, None), [], [1.0], ["dog", "greedy", "schedulefree"])
    assert found["dog"] == "dog is not installed"
    assert all(isinstance(outcome, str) for outcome in found.values())


@pytest.mark.parametrize("optimizer", ["adam", "momentum"])
def test_published_without_spread_is_plain_training(monkeypatch: pytest.MonkeyPatch, optimizer: str) -> None:
    monkeypatch.setattr(real.rows, "ALPHA", 0.0)
    here, best = bench(optimizer, "feed"), Best(1e-2, None)
    plain = fixed(here, best, [1.0, 10.0], [], ["onecycle"])["onecycle"]
    found = published(here, best, [], [1.0, 10.0], ["published"])["published"]
    for row, other in zip(found.curves, plain.curves, strict=True):
        assert [curve[-1] for curve in row] == pytest.approx([curve[-1] for curve in other], rel=1e-5)


@pytest.mark.parametrize(("optimizer", "name", "steps"), [("muon", "text", 16), ("adafactor", "digits", 80)])
def test_auto_and_its_controls(optimizer: str, name: str, steps: int) -> None:
    here = bench(optimizer, name, steps, seeds=(0, 1))
    found = auto(here, Best(CUSTOMARY[optimizer], None), [], [100.0, 1.0], ["auto", "auto-alone", "placebo"])
    assert [outcome.starts for outcome in found.values()] == [[100.0, 1.0]] * 3
    assert all(math.isfinite(curve[-1]) for row in found["auto"].curves for curve in row)
    if steps > 16:  # long enough to have found something
        assert found["auto"].found != found["placebo"].found
        assert len({rate for row in found["placebo"].found for rate in row}) == 4  # each has its own coins
        one = auto(here, Best(CUSTOMARY[optimizer], None), [], [100.0], ["auto-alone"])["auto-alone"]
        assert one.curves[0][1] == pytest.approx(found["auto-alone"].curves[0][1], rel=1e-6)


def test_rows_are_kept_and_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = {"tiny": workload()}
    words = "--workloads dev --quick --rows onecycle,customary,published,auto"
    ledger = real_lr.run_workload(plan_of(words, known, tmp_path), known["tiny"])
    there = json.loads((tmp_path / "tiny.json").read_text())
    assert set(there["rows"]) == {"onecycle", "customary", "published", "auto"} == set(ledger.content["rows"])
    assert there["initial"] > 0
    assert [cell["start"] for cell in there["rows"]["onecycle"]["starts"]] == [0.01, 1.0, 100.0]
    assert len(there["rows"]["onecycle"]["starts"][0]["curves"][0]) == 4
    assert there["rows"]["auto"]["library"]
    capsys.readouterr()
    real_lr.run_workload(plan_of(words, known, tmp_path), known["tiny"])
    assert "auto:" not in capsys.readouterr().out
    real_lr.run_workload(plan_of(words + " --again --rows customary", known, tmp_path), known["tiny"])
    out = capsys.readouterr().out
    assert "customary:" in out
    assert "onecycle" not in out
    assert set(json.loads((tmp_path / "tiny.json").read_text())["rows"]) == set(there["rows"])


def test_test_runs_are_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"held": workload("held", "test")}
    with pytest.raises(SystemExit):
        plan_of("--workloads test --quick", known, tmp_path)
    plan = plan_of("--workloads test --quick --rows customary --log why", known, tmp_path)
    real_lr.run_workload(plan, known["held"])
    real_lr.run_workload(plan, known["held"])  # nothing to run: no line
    lines = [json.loads(line) for line in (tmp_path / "test_runs.jsonl").read_text().splitlines()]
    assert [(line["workload"], line["rows"], line["reason"]) for line in lines] == [("held", ["customary"], "why")]
    assert lines[0]["commit"]


def test_splits_and_names_may_be_mixed(tmp_path: Path) -> None:
    known = {name: workload(name, split) for name, split in (("a", "dev"), ("b", "seen"), ("c", "kin"), ("d", "test"))}
    assert plan_of("--workloads seen", known, tmp_path).workloads == ["b"]  # no reason is asked for
    assert plan_of("--workloads kin,a,dev", known, tmp_path).workloads == ["c", "a"]
    assert plan_of("--workloads all --log why", known, tmp_path).workloads == ["a", "b", "c", "d"]
    for words in ("--workloads all", "--workloads dev,d", "--workloads other"):
        with pytest.raises(SystemExit):
            plan_of(words, known, tmp_path)


def test_a_process_per_workload(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    line = "sys.stdout.write(' '.join(sys.argv[1:]) + chr(10))"  # in one piece: two processes write at once
    script.write_text(f"import sys; {line}; sys.exit('bad' in sys.argv)")
    words = without(["--workloads", "dev", "--again", "--processes=4"], "--processes", "--workloads", "--seconds")
    assert in_processes(script, words, ["good", "bad"], 2, math.inf) == 1
    assert in_processes(script, words, ["late"], 2, 0.0) == 0
    out = capfd.readouterr().out
    assert "--again --workloads good" in out
    assert "late: no time left" in out
