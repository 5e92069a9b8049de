"""lab/experiments/real: every workload is a task that trains as a row of a stack. No data are needed."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch
from real.bench import Validator
from real.data import FOLDER, NOTES, stand_in
from real.optimizers import CUSTOMARY, update_of
from real.pools import Rows, Windows, batches_of
from real.problems import images, science, tables, texts
from real.workloads import SPLITS, WORKLOADS
from stacked import Stack, Supply, TrainStep
from tests.examples.launch import ROOT

from lab.tasks import Task
from lab.tests.experiments.small_tasks import CPU

PROBLEMS = {repr(workload.build): name for name, workload in WORKLOADS.items()}
EVERY = pytest.mark.parametrize("name", PROBLEMS.values())
"""One workload of every problem: others have the same one with another optimizer or length."""
DECISIONS = {"kin": "019-nothing-to-hand-over.md", "test": "025-the-beginning-of-a-run.md"}
TEST = [name for name, workload in WORKLOADS.items() if workload.split == "test"]
ALONE = ("blocks-graph", "shakespeare-gpt-batch256")
"""There are not enough samples for a second replica."""


@cache
def task(name: str) -> Task:
    return WORKLOADS[name].task(synthetic=True)


def test_the_table_is_that_of_the_decision() -> None:
    splits = [workload.split for workload in WORKLOADS.values()]
    assert {split: splits.count(split) for split in SPLITS} == {"dev": 6, "kin": 29, "seen": 13, "test": 8}
    assert len(splits) == 56
    assert {workload.optimizer for workload in WORKLOADS.values()} <= CUSTOMARY.keys()
    assert WORKLOADS["shakespeare-gru"].customary == 1e-4


@pytest.mark.parametrize("name", [name for name, workload in WORKLOADS.items() if workload.split in DECISIONS])
def test_every_new_workload_stands_in_the_decision(name: str) -> None:
    """Some lines have two, and as many lengths."""
    text = (ROOT / "docs" / "decisions" / DECISIONS[WORKLOADS[name].split]).read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith("|") and name in re.split(r"[|, ]+", line)]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    place = cells[0].split(", ").index(name)
    assert int(cells[-1].split(", ")[-1 if "," not in cells[-1] else place]) == WORKLOADS[name].steps
    words = cells[-2].lower()
    known = {"momentum": "sgd, momentum 0.9", "sgd": "sgd"}.get(WORKLOADS[name].optimizer, WORKLOADS[name].optimizer)
    assert known in words


def test_test_has_no_data_of_other_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    used: dict[str, set[str]] = {split: set() for split in SPLITS}
    for workload in WORKLOADS.values():

        def noted(data: str, synthetic: bool, asked: set[str] = used[workload.split]) -> dict[str, torch.Tensor]:
            asked.add(data)
            return stand_in(data)

        for module in (images, science, tables, texts):
            monkeypatch.setattr(module, "load_or_stand_in", noted)
        workload.task(synthetic=True)
    assert used["test"] == {
        "molecules", "concepts", "patients", "brain", "appliances", "genes", "code", "locales"
    }  # fmt: skip
    assert not used["test"] & (used["dev"] | used["kin"] | used["seen"])


@EVERY
def test_gradients_of_a_stack_are_those_of_the_model(name: str) -> None:
    one = task(name)
    batches = [one.batch(seed, 0) for seed in (0, 1)]
    stack = Stack(one, [0, 1], 2, CPU)
    stack.theta[:, 1] *= 1.01
    gradients, losses = stack.gradients(stack.theta, tuple(torch.stack(part) for part in zip(*batches, strict=True)))
    model = one.model(1)
    loss = one.loss(model, batches[1])
    loss.backward()
    expected = torch.cat([p.grad.flatten() for group in one.groups(model) for p in group["params"]])
    torch.testing.assert_close(losses[1, 0], loss.detach())
    torch.testing.assert_close(gradients[1, 0], expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    assert losses.isfinite().all()
    assert not torch.equal(gradients[1, 0], gradients[1, 1])


@EVERY
def test_batches_depend_on_their_arguments_alone(name: str) -> None:
    one, state = task(name), torch.random.get_rng_state()
    first = one.batch(3, 2)
    weights = torch.nn.utils.parameters_to_vector(one.model(3).parameters())
    again = WORKLOADS[name].task(synthetic=True)
    again.batch(4, 0)
    assert all(map(torch.equal, first, again.batch(3, 2)))
    assert torch.equal(weights, torch.nn.utils.parameters_to_vector(again.model(3).parameters()))
    assert torch.equal(state, torch.random.get_rng_state())
    for other in (one.batch(3, 3), one.batch(4, 2)):
        assert not torch.equal(first[0], other[0])


@EVERY
def test_replicas_share_no_batch(name: str) -> None:
    one = task(name)
    assert len(one.batch(0, 0)[0]) == one.batch_size
    if name not in ALONE:
        halves = [one.batch(0, 0, replica, 2) for replica in (0, 1)]
        assert not torch.equal(halves[0][0], halves[1][0])


@EVERY
def test_validation_is_the_same_for_a_stack(name: str) -> None:
    one = task(name)
    parts = one.validation()
    assert len({part[0].shape for part in parts}) == 1
    assert [p.dtype for p in parts[0]] == [p.dtype for p in one.batch(0, 0)]
    stack = Stack(one, [0], 1, CPU)
    # A stack normalises by the batch, as a model in training does; other models do not care.
    model = one.model(0)
    with torch.no_grad():
        losses = [float(one.loss(model, part)) for part in parts]
    assert float(stack.validation(stack.theta)) == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    assert one.evaluate(model).keys() == {"loss"}


@EVERY
def test_every_parameter_is_in_one_group(name: str) -> None:
    model = task(name).model(0)
    grouped = [id(p) for group in task(name).groups(model) for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())


@EVERY
def test_a_stand_in_can_be_learnt(name: str) -> None:
    one = task(name)
    model = one.model(0)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    batch = one.batch(0, 0)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = one.loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.98 * losses[0]


@pytest.mark.parametrize("name", TEST)
def test_runs_of_the_test_learn_as_rows_of_a_stack(name: str) -> None:
    """With their own optimizers, on one batch again and again."""
    one, workload = task(name), WORKLOADS[name]
    stack = Stack(one, [0, 1], 2, CPU)
    batches = tuple(part.expand(8, *part.shape[1:]) for part in Supply(one, [0, 1], 1, CPU).batches)
    rates = torch.tensor([0.5, 1.0])[:, None] * workload.customary * torch.ones(8, 2, 2, len(stack.sizes))
    step = TrainStep(stack, update_of(workload.optimizer, stack), batches, rates, graph=False)
    step()
    first = step.losses.clone()
    for _ in range(7):
        step()
    assert (step.losses < first).all()


@pytest.mark.parametrize("name", TEST)
def test_batches_of_the_test_come_from_the_data(name: str) -> None:
    """Where they have been fetched."""
    data = name.partition("-")[0]
    if not (FOLDER / f"{data}.npz").exists():
        pytest.skip(f"there is no data set {data} here")
    real, synthetic = WORKLOADS[name].task(), task(name)
    for one, other in ((real.batch(0, 0), synthetic.batch(0, 0)), (real.validation()[0], synthetic.validation()[0])):
        assert [(part.dtype, part.shape[1:]) for part in one] == [(part.dtype, part.shape[1:]) for part in other]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@EVERY
def test_steps_and_validation_can_be_captured(name: str) -> None:
    one, device, found = task(name), torch.device("cuda"), []
    supply = Supply(one, [0, 1], 3, device)
    for graph in (False, True):
        stack = Stack(one, [0, 1], 2, device)
        rates = torch.full((3, 2, 2, len(stack.sizes)), WORKLOADS[name].customary / 10, device=device)
        step = TrainStep(stack, update_of(WORKLOADS[name].optimizer, stack), supply.batches, rates, graph=graph)
        for _ in range(3):
            step()
        found.append(torch.stack([step.losses.double(), Validator(stack, stack.theta, graph)(stack.theta)]).cpu())
    torch.testing.assert_close(*found, rtol=1e-2, atol=1e-3)


def test_labels_are_wrong_in_training_only() -> None:
    """Drawn anew: 30 %, of which a tenth are right by chance."""
    noisy, clean = WORKLOADS["mnist-resnet-noisy"].task(True), WORKLOADS["mnist-cnn"].task(True)
    labels = stand_in("mnist")["train_labels"]
    wrong = noisy._pool.tables[1] != labels  # type: ignore[attr-defined]
    assert 0.2 < float(wrong.double().mean()) < 0.34
    assert all(map(torch.equal, noisy.validation()[0], clean.validation()[0]))
    assert torch.equal(clean._pool.tables[1], labels)  # type: ignore[attr-defined]


def test_fine_tuning_begins_at_one_place() -> None:
    weights = [torch.nn.utils.parameters_to_vector(task("kjv-finetune").model(seed).parameters()) for seed in (0, 1)]
    assert torch.equal(*weights)


def test_padding_does_not_count() -> None:
    one = task("cmudict-seq2seq")
    letters, phonemes = one.batch(0, 0)
    model = one.model(0)
    with torch.no_grad():
        logits = model(letters.long(), phonemes.long())
        picked = logits.log_softmax(-1).gather(-1, phonemes.long()[..., None])[..., 0]
        loss = one.loss(model, (letters, phonemes))
    torch.testing.assert_close(loss, -picked[phonemes != 0].mean())


def test_a_decoder_does_not_see_what_it_predicts() -> None:
    one = task("cmudict-seq2seq")
    letters, phonemes = (part.long() for part in one.batch(0, 0))
    model = one.model(0)
    changed = phonemes.clone()
    changed[:, 5:] = 1
    torch.testing.assert_close(model(letters, phonemes)[:, :6], model(letters, changed)[:, :6])


def test_music_is_transposed_as_a_whole() -> None:
    one = task("bach-gru")
    (notes,) = one.batch(0, 0)
    assert int(notes.max()) < NOTES
    intervals = notes.int()[..., 0] - notes.int()[..., 3]
    assert int(intervals.min()) == int(intervals.max()) == 22  # the voices of the stand-in


def test_windows_stay_inside_and_all_stands_side_by_side() -> None:
    windows = Windows(torch.arange(100), 9)
    (last,) = windows.take(torch.full((500,), windows.count - 1), torch.Generator().manual_seed(0))
    assert int(last.max()) == 98
    (rows,) = windows.all().tables
    assert torch.equal(rows[1:, 0], rows[:-1, -1])


def test_held_out_rows_are_spread_in_equal_batches() -> None:
    parts = batches_of(Rows((torch.arange(100),)), "some", 50, 20)
    assert [len(part[0]) for part in parts] == [20, 20]
    assert parts[0][0][:3].tolist() == [0, 2, 5]
    assert [len(part[0]) for part in batches_of(Rows((torch.arange(7),)), "some", 50, 20)] == [7]
