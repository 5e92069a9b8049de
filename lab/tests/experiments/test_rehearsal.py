"""The rehearsal of AlgoPerf: the loss of made speech, and from curves to a table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import rehearsal
import torch
from real.models.speech import heard
from real.problems.made import speech
from torch.nn.functional import ctc_loss, log_softmax


def test_what_was_heard_is_torchs_ctc() -> None:
    generator = torch.Generator().manual_seed(0)
    raw = torch.randn(5, 20, 7, dtype=torch.float64, generator=generator).requires_grad_()
    sounds = torch.randint(1, 7, (5, 6), generator=generator)
    sounds[0, 1] = sounds[0, 0]  # a blank must stand between two equal ones
    logs = log_softmax(raw, -1)
    lengths = torch.full((5,), 20), torch.full((5,), 6)
    expected = ctc_loss(logs.transpose(0, 1), sounds, *lengths, reduction="none")
    torch.testing.assert_close(heard(logs, sounds), expected)
    own, theirs = (
        torch.autograd.grad(loss.sum(), raw, retain_graph=True)[0] for loss in (heard(logs, sounds), expected)
    )
    torch.testing.assert_close(own, theirs)


def test_speech_can_be_learned() -> None:
    task = speech("speech", synthetic=True)
    model = task.model(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for step in range(20):
        loss = task.loss(model, task.batch(0, step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 1


CONTENTS = {
    "fashion-vit": {
        "arguments": {"steps": 100},
        "evaluated": [50, 100],
        "target": {"loss": 0.5},
        "curves": {
            "hdet": [[0.4, 0.3], [0.6, 0.5], [0.4, None]],
            "nadamw": [[0.9, 0.5], [0.9, 0.4], [0.9, 0.9]],
            "onecycle": [[0.9, 0.9], [None, 0.9], [0.1, 0.1]],
        },
    }
}


def test_the_median_study_counts() -> None:
    assert rehearsal.times(CONTENTS, "hdet") == {"fashion-vit": 50}
    assert rehearsal.times(CONTENTS, "nadamw") == {"fashion-vit": 100}


def test_a_table_has_shares_of_the_budget_and_scores() -> None:
    hdet, nadamw, oracle = rehearsal.table(CONTENTS, {"hdet": 2.0}).splitlines()[2:]
    assert "| 0.50 |" in hdet
    assert hdet.endswith("| 1.000 (1.000) | 1.000 (1.000) |")
    assert "| 1.00 |" in nadamw
    assert nadamw.endswith("| 0.667 (1.000) | 0.667 (1.000) |")
    assert "| missed |" in oracle


def test_a_study_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--split", "dev", "--quick", "--synthetic", "--results", str(tmp_path)]
    rehearsal.main([*words, "--seconds", "0"])
    assert not list(tmp_path.iterdir())
    arguments = rehearsal.argparse.Namespace(
        quick=True, synthetic=True, again=False, variants=False, results=tmp_path, device=torch.device("cpu"), log=""
    )
    workload = rehearsal.WORKLOADS["movielens-factors"]
    rehearsal.Study(workload, arguments).run(float("inf"))
    content = json.loads((tmp_path / "movielens-factors.json").read_text())
    assert {"hdet", "hdet-free", "nadamw", "adamw", "onecycle"} <= set(content["curves"])
    assert len(content["curves"]["hdet"][0]) == len(content["evaluated"])
    assert content["target"]["loss"] > 0
    capsys.readouterr()
    rehearsal.Study(workload, arguments).run(float("inf"))
    assert capsys.readouterr().out == ""


def test_a_run_of_test_needs_a_reason() -> None:
    with pytest.raises(SystemExit):
        rehearsal.main(["--split", "test"])


def test_a_candidate_is_scored_among_other_people_and_not_against_the_other_one() -> None:
    content = CONTENTS["fashion-vit"]
    curves = {**content["curves"], "hdet-free": [[0.9, 0.5]] * 3}  # type: ignore[dict-item]
    hdet, free, nadamw, _ = rehearsal.table({"fashion-vit": {**content, "curves": curves}}, {}).splitlines()[2:]
    assert hdet.endswith("| 1.000 (1.000) |")
    assert free.endswith("| 1.000 (1.000) |")
    assert nadamw.endswith("| 0.667 (0.667) |")


def test_variants_are_sorted_by_their_scores() -> None:
    content = {
        **CONTENTS["fashion-vit"],
        "variants": {"hold-30": [[0.9, 0.5]] * 3, "free-10": [[0.4, 0.25]] * 3, "climb-10 ~0.08": [[0.9, None]] * 3},
    }
    best, second, last = rehearsal.variants_table({"fashion-resnet": content}).splitlines()[2:]
    assert "`free-10` | Schedule-Free, climb to 0.1 | 0.50 | 0.500 | 1.000 |" in best
    assert "`hold-30` | NAdamW, held to 0.3 | 1.00 | 1.000 | 1.000 |" in second
    assert "`climb-10 ~0.08` | NAdamW, climb to 0.1 | missed | inf | 0.000 |" in last


def test_both_tables_are_made_from_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fashion-vit.json").write_text(json.dumps(CONTENTS["fashion-vit"]))
    rehearsal.main(["--table", "--results", str(tmp_path)])
    assert "hdet.auto" in capsys.readouterr().out
    rehearsal.main(["--table", "--variants", "--results", str(tmp_path)])
    assert capsys.readouterr().out == "Nothing has been measured yet.\n"
