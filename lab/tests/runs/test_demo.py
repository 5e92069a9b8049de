"""What the demonstration says of its runs."""

from __future__ import annotations

from pathlib import Path

from tests.report.made_up import a_header, a_round, write_folder

from lab.runs.demo import ensemble, ensemble_table, guess_table, guess_words, guesses
from lab.runs.folder import Folder
from lab.runs.result import Result, result_of


def seen(tmp_path: Path) -> list[Result]:
    """Scene one, made up: torch with a good rate, and then torch and hdet from two bad ones."""
    runs = []
    for i, plan in enumerate(guesses(tmp_path, 20).plans):
        given = plan.guess if plan.lr == "auto" else plan.lr
        found = a_round(0, learned=[0.05 / float(given)], base=[0.05])
        journal = [a_header(max_lr=given), found] if plan.method == "search" else []
        arguments = plan.arguments()
        folder = write_folder(tmp_path / str(i), *journal, arguments=arguments, final={"loss": i + 0.5})
        runs.append(result_of(Folder(folder)))
    return runs


def test_scene_one_in_a_table_and_in_a_sentence(tmp_path: Path) -> None:
    runs = seen(tmp_path)
    assert list(guess_table(runs).rows) == [
        ["about right", "0.01", "0.5", "", ""],
        ["100× too low", "0.0001", "1.5", "2.5", "0.05"],
        ["100× too high", "1", "3.5", "4.5", "0.05"],
    ]
    assert guess_words(runs) == (
        "From guesses 100× too low and 100× too high hdet found 0.05 and 0.05, and came to a validation loss of 2.5 "
        "and 4.5; torch came to 1.5 and 3.5, and with a good rate to 0.5."
    )


def test_scene_two_has_a_table_of_its_own(tmp_path: Path) -> None:
    (plan,) = ensemble(tmp_path, 20, 2).plans
    assert plan.task != guesses(tmp_path, 20).plans[0].task  # its loss may not be ranked with theirs
    folder = write_folder(tmp_path / "x", a_header(max_lr=0.1), a_round(0), final={"loss": 0.7, "auc_like": 0.9})
    table = ensemble_table(result_of(Folder(folder)))
    assert table.columns == ("replicas", "rounds", "validation loss", "AUC, like", "peak rate")
    assert table.rows == [["2", "1", "0.7", "0.9", "0.1 → 0.1"]]
