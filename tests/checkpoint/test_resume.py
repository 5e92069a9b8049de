"""A search that is cut and goes on is the search that was not cut, bit by bit, wherever that was."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch

import hdet
from tests.checkpoint.searching import STEPS, Searching
from tests.models import batch, make_optimizer, two_layer
from tests.processes import run_ranks


def cuts() -> list[int]:
    """The first steps, and before, at and after the ends of rounds."""
    return [1, 2, 3, 4, 6, 9, *(t for end in (18, 36, 51) for t in (end - 1, end, end + 1))]


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_bit_equal_wherever_it_is_cut(tmp_path: Path, optimizer: str) -> None:
    whole, path = Searching(optimizer=optimizer), tmp_path / "run.pt"
    saved: dict[int, Path] = {}
    for cut in cuts():
        whole.go(len(whole.rates), cut)
        saved[cut] = tmp_path / f"{cut}.pt"
        whole.save(saved[cut])
    whole.go(len(whole.rates), STEPS)
    assert len(set(whole.rates)) > STEPS // 2
    for cut, path in saved.items():
        with warnings.catch_warnings():
            warnings.simplefilter("error", hdet.ResumeWarning)
            resumed = Searching.loaded(path, optimizer=optimizer).go(cut, STEPS)
        assert resumed.equals(whole), f"cut at step {cut}"


def test_bit_equal_when_it_goes_back_after_the_cut(tmp_path: Path) -> None:
    """The weights to go back to were kept before the cut."""

    def trained(run: Searching, begin: int, end: int) -> Searching:
        for step in range(begin, end):
            run.go(step, step + 1)
            if step == 29:
                with torch.no_grad():
                    for p in run.model.parameters():
                        p.mul_(30.0)  # ruined: the end of the round will see it
        return run

    events: list[Any] = []

    class Sink:
        def write(self, record: Any) -> None:
            events.append(record.get("event"))

    whole, cut = trained(Searching(journal=Sink()), 0, 60), Searching()
    assert any("rolled_back" in str(event) for event in events)
    trained(cut, 0, 28).save(tmp_path / "run.pt")
    assert trained(Searching.loaded(tmp_path / "run.pt"), 28, 60).equals(whole)


def test_without_the_search_it_begins_anew_and_says_so_once(tmp_path: Path) -> None:
    Searching().go(0, 20).save(tmp_path / "run.pt", search=False)
    resumed = Searching.loaded(tmp_path / "run.pt")
    with pytest.warns(hdet.ResumeWarning, match=r"resumed at step 20 .*new ones\. Save with hdet\.save") as said:
        resumed.go(20, 22)
    assert len(said) == 1
    assert said[0].filename.endswith("searching.py")
    resumed.go(22, STEPS)
    assert math.isfinite(resumed.rates[-1])


def test_the_states_by_hand(tmp_path: Path) -> None:
    """For frameworks that save by themselves: three states, the search after the scheduler and the optimizer."""
    whole = Searching().go(0, 20)
    states = {name: part.state_dict() for name, part in whole.parts.items()}
    torch.save({**states, "search": whole.scheduler.search_state_dict()}, tmp_path / "own.pt")
    whole.go(20, STEPS)
    saved = torch.load(tmp_path / "own.pt", weights_only=True)
    resumed = Searching(seed=1)
    for name, part in resumed.parts.items():
        part.load_state_dict(saved[name])
    resumed.scheduler.load_search_state_dict(saved["search"])
    resumed.rates = whole.rates[:20]
    assert resumed.go(20, STEPS).equals(whole)


def test_a_search_of_something_else_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    run, other = Searching().go(0, 20), Searching().go(0, 25)
    fits, before = run.scheduler.search_state_dict(), run.scheduler.state_dict()
    late = other.scheduler.search_state_dict()
    smaller = {**fits, "snapshots": [[0, {"places": [0], "weights": []}]]}
    for search in (late, smaller, {**fits, "version": 0}, {**fits, "measure": 3}, {**fits, "losses": 3}):
        with pytest.raises(hdet.ArgumentError, match=r"the state of a search (does not fit|has version = 0)"):
            run.scheduler.load_search_state_dict(search)
    with pytest.raises(hdet.ArgumentError, match="state_dict must be a dict"):
        run.scheduler.load_search_state_dict([1, 2])
    assert repr(run.scheduler.state_dict()) == repr(before)
    assert run.go(20, STEPS).equals(Searching().go(0, STEPS))


# -- replicas that train apart, cut inside a round --------------------------------------------------------------------


def _trained(rank: int, seed: int, cut: int | None, path: str) -> float:
    """The final loss of a small run; cut and resumed, if told so."""

    def build() -> tuple[Any, Any, Any]:
        model = two_layer(seed)
        optimizer = make_optimizer("adam", [list(model.parameters())])
        return model, optimizer, hdet.OneCycleLR(optimizer, 0.03, 120, sync_every=20, model=model)

    model, optimizer, scheduler = build()
    for step in range(120):
        if step == cut:
            hdet.save(path, model=model, optimizer=optimizer, scheduler=scheduler)
            model, optimizer, scheduler = build()
            hdet.load(path, model=model, optimizer=optimizer, scheduler=scheduler)
        x, y = batch(1000 * seed + step, rank)
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.distributed.all_reduce(flat := torch.cat([p.grad.flatten() for p in model.parameters()]))
        for p, grad in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
            p.grad = grad.view_as(p) / 2
        optimizer.step()
        scheduler.step(loss)
    x, y = batch(10**6, 0, 2000)
    return float((model(x) - y).square().mean())


def _seeds(rank: int, folder: str) -> tuple[list[float], list[float]]:
    warnings.simplefilter("ignore", hdet.ResumeWarning)
    whole = [_trained(rank, seed, None, "") for seed in range(4)]
    cut = [_trained(rank, seed, 50, f"{folder}/{seed}.pt") for seed in range(2)]
    return whole, cut


@pytest.mark.slow
def test_trained_apart_and_cut_inside_a_round(tmp_path: Path) -> None:
    """The final loss is within 1 % of the run that was not cut, or two standard deviations of other seeds."""
    whole, cut = run_ranks(_seeds, 2, str(tmp_path))[0]
    bound = max(0.01 * fmean(whole), 2 * stdev(whole))
    for undisturbed, resumed in zip(whole, cut, strict=False):
        assert resumed - undisturbed < bound
        assert resumed - undisturbed < 0.01 * undisturbed  # in fact


def one_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)


def trained(total_steps: int) -> Any:
    return hdet.OneCycleLR(one_optimizer(), 0.1, total_steps)


def ensemble(total_steps: int | None) -> Any:
    return hdet.Ensemble(one_optimizer(), total_steps=total_steps)


def of_torch(total_steps: int) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(one_optimizer(), 0.1, total_steps)


@pytest.mark.parametrize(("of", "into"), [(trained, trained), (ensemble, ensemble), (of_torch, trained)])
def test_another_length_is_told_when_it_is_loaded(of: Any, into: Any) -> None:
    state, scheduler = of(80).state_dict(), into(160)
    with pytest.warns(hdet.ResumeWarning, match=r"80 steps, .* total_steps=160.*; ") as told:
        scheduler.load_state_dict(state)
    assert scheduler.state_dict()["total_steps"] == 80
    assert [warning.filename for warning in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        into(80).load_state_dict(state)


def test_a_length_that_nobody_gave_is_no_other_length() -> None:
    state, scheduler = ensemble(80).state_dict(), ensemble(None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.load_state_dict(state)
    assert scheduler.state_dict()["total_steps"] == 80
