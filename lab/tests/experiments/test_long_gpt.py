"""lab/experiments/long_gpt.py in miniature: a row that is interrupted ends as one that is not."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import long_gpt
import numpy as np
import pytest
import torch
from long_gpt import TINY, Bench, Row, Windows, scored, table
from long_gpt_data import END, Known, decoded, encoded, learned, load, looks_written, packed, pinned

pytestmark = pytest.mark.filterwarnings("ignore::hdet.SearchWarning")  # 45 steps are too few to learn much
STEPS = 45


def ran(results: Path, *more: str) -> dict[str, Any]:
    """The rows of the file after a call."""
    fixed = ["--tiny", "--device", "cpu", "--steps", str(STEPS), "--rates", "1e-3", "--guesses", "1e-6"]
    long_gpt.main([*fixed, "--results", str(results), *more])
    content: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {"rows": {}}
    return content


def essence(content: dict[str, Any]) -> dict[str, list[Any]]:
    return {
        name: [row.get(key) for key in ("loss", "ratio", "train", "found", "status", "rolled_back")]
        for name, row in content["rows"].items()
    }


def kill_at(monkeypatch: pytest.MonkeyPatch, step: int, after: int = 0) -> None:
    """End the process, as it were, in a step of the row that comes after so many."""
    plain, seen = Bench.loss, [0]

    def loss(bench: Bench, t: int) -> torch.Tensor:
        seen[0] += t == step
        if t == step and seen[0] > after:
            raise KeyboardInterrupt
        return plain(bench, t)

    monkeypatch.setattr(Bench, "loss", loss)


def test_rows_that_are_interrupted_end_as_others_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ran(tmp_path / "whole.json")
    assert [*whole["rows"]] == ["fixed 0.001", "auto 1e-06"]
    assert whole["head"]["tokens_trained_on"] == STEPS * TINY.batch * TINY.context
    assert whole["rows"]["auto 1e-06"]["found"] > 1e-5

    path, state = tmp_path / "pieces.json", tmp_path / "state"
    in_pieces = ("--state", str(state), "--every", "10")
    for step, after in ((27, 0), (34, 1)):  # of the first row, and of the second
        with monkeypatch.context() as patch:
            kill_at(patch, step, after)
            with pytest.raises(KeyboardInterrupt):
                ran(path, *in_pieces)
        (left,) = state.glob("*.pt")
        ran(path, *in_pieces, "--seconds", "0")  # one step more
        assert left.exists()
    assert [*ran(path, *in_pieces, "--seconds", "0")["rows"]] == ["fixed 0.001"]
    assert essence(ran(path, *in_pieces)) == essence(whole)
    assert not list(state.glob("*.pt"))


def test_a_row_is_run_once_unless_it_is_made_in_another_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "long.json"
    first = ran(path)
    with monkeypatch.context() as patch:
        kill_at(patch, 0)  # no step is made
        assert ran(path) == first
    monkeypatch.setattr(long_gpt, "library", lambda: "another rule")
    again = ran(path)["rows"]
    assert again["fixed 0.001"] == first["rows"]["fixed 0.001"]
    assert again["auto 1e-06"]["library"] == "another rule"
    assert [*ran(path, "--seed", "1", "--guesses", "")["rows"]] == ["fixed 0.001"]


def test_windows_have_every_token_once() -> None:
    tokens = torch.arange(TINY.batch * TINY.context * 3 + 1)
    windows = Windows(tokens, TINY)
    windows.shuffle(seed=0)
    seen = torch.cat([windows.batch(t) for t in range(len(windows))])
    assert len(windows) == 3
    assert seen[:, 0].tolist() != sorted(seen[:, 0].tolist())
    assert seen[:, :-1].flatten().sort().values.tolist() == tokens[:-1].tolist()
    assert (seen[:, 1:] == seen[:, :-1] + 1).all()


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="3000 steps must have 192000 tokens"):
        Bench(TINY, long_gpt.tiny_corpus(50), 3000, 0, torch.device("cpu"))


def content(*losses: tuple[str, float, float | None]) -> dict[str, Any]:
    rows = [{**Row(way, rate)._asdict(), "loss": loss, "seconds": 1.0} for way, rate, loss in losses]
    return {"rows": {str(n): row for n, row in enumerate(rows)}}


@pytest.mark.parametrize(
    ("auto", "words"), [(2.015, "PASS"), (2.03, "MISS"), (None, "MISS"), (math.nan, "MISS")], ids=str
)
def test_scores_are_over_the_best_fixed_rate(auto: float | None, words: str) -> None:
    found = scored(content(("fixed", 1e-3, 2.0), ("fixed", 1e-2, None), ("fixed", 1e-4, 3.0), ("auto", 1.0, auto)))
    assert found["best"] == {"rate": 1e-3, "on_edge": False}
    assert [row["ratio"] for row in found["rows"].values()][:3] == [1.0, None, 1.5]
    printed = table(json.loads(json.dumps(found).replace("NaN", "null")))
    assert words in printed
    assert "on the edge" not in printed


def test_a_best_rate_on_the_edge_is_said() -> None:
    printed = table(scored(content(("fixed", 1e-3, 2.0), ("fixed", 1e-4, 3.0), ("auto", 1.0, 2.0))))
    assert "0.001, is on the edge" in printed


# The corpus ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["x = 1", "x = 1  # a line\n" * 30_000, "1234567890, " * 50, "x" * 1001, "größer und länger\n" * 20],
    ids=["short", "long", "table", "one line", "not ASCII"],
)
def test_files_that_nobody_wrote_are_left_out(text: str) -> None:
    assert not looks_written(text)
    assert looks_written("def f(x):\n    return x  # as it is\n" * 10)


def test_files_that_repeat_others_are_left_out() -> None:
    known = Known()
    lines = [f"this is a line of some length, with number {n}" for n in range(10)]
    assert known.adds("\n".join(lines))
    assert not known.adds("\n".join([*lines[:6], *(line.upper() for line in lines[:4])]))
    assert known.adds("\n".join([*lines[:4], *(line.upper() for line in lines[:6])]))
    assert not known.adds("    " + lines[0])
    assert [known.adds(text) for text in ("short\nlines", "short\nlines", "others")] == [True, False, True]


def test_parts_share_no_package_and_everything_is_pinned() -> None:
    parts = pinned()
    assert not {one.name for one in parts["train"]} & {one.name for one in parts["held_out"]}
    assert all(len(one.sha256) == 64 and one.version in one.file for part in parts.values() for one in part)


def test_tokens_come_back_as_they_were(tmp_path: Path) -> None:
    tokens = {"train": [5, 16_383, 0], "held_out": [7]}
    for part, own in tokens.items():
        (tmp_path / f"{part}.xz").write_bytes(packed(np.array(own, np.uint16)))
    with pytest.raises(FileNotFoundError, match=r"long_gpt_data\.py"):
        load(torch.device("cpu"), tmp_path)
    (tmp_path / "corpus.json").write_text('{"vocabulary": 16384}')
    train, held_out, facts = load(torch.device("cpu"), tmp_path)
    assert (train.tolist(), held_out.tolist(), facts["vocabulary"]) == ([5, 16_383, 0], [7], 16_384)


def test_every_file_is_encoded_with_its_end() -> None:
    pytest.importorskip("tokenizers")
    files = [*decoded([b"def f():\r\n    return 1\n", b"\xff", b"def g():\n    return 2\n"])]
    encoding = learned(files)
    tokens = encoded(encoding, files)
    end = encoding.token_to_id(END)
    assert (tokens == end).sum() == 2
    assert tokens[-1] == end
    assert encoding.decode(tokens.tolist(), skip_special_tokens=False) == END.join([*files, ""])
