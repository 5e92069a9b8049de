"""A checkpoint that does not fit changes nothing: all parts get back what they were."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import hdet
from hdet.checkpoint import file as checkpoint_file
from tests.checkpoint.searching import Searching


def network(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(300, 4), nn.Tanh(), nn.Linear(4, 1, bias=False))


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.randn(8, 300, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()


def snapshot(**parts: Any) -> Any:
    """Everything that they hold, bit by bit."""
    searches = {name: part.search_state_dict() for name, part in parts.items() if hasattr(part, "search_state_dict")}
    return frozen([{name: part.state_dict() for name, part in parts.items()}, searches])


def frozen(value: Any) -> Any:
    """Tensors as bytes."""
    if isinstance(value, Tensor):
        flat = value.detach().contiguous().view(-1)
        return str(value.dtype), tuple(value.shape), flat.view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    return [frozen(item) for item in value] if isinstance(value, (list, tuple)) else value


def refused(path: Path, words: str, **parts: Any) -> None:
    """A load raises an error that says so, and changes nothing."""
    before = snapshot(**parts)
    with pytest.raises(hdet.ArgumentError, match=words):
        hdet.load(path, **parts)
    assert snapshot(**parts) == before


def rewritten(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Its content changed, and sealed again."""
    content = copy.deepcopy(checkpoint_file.read(path))
    change(content)
    checkpoint_file.write(path, content, 1)
    return path


# -- optimizers -------------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda ps: torch.optim.Adam(ps, 0.01),
    "AMSGrad": lambda ps: torch.optim.Adam(ps, 0.01, amsgrad=True),
    "fused": lambda ps: torch.optim.AdamW(ps, 0.01, fused=True),
    "a rate as tensor": lambda ps: torch.optim.Adam(ps, torch.tensor(0.01)),
    "NAdam": lambda ps: torch.optim.NAdam(ps, 0.01),
    "RAdam": lambda ps: torch.optim.RAdam(ps, 0.01),
    "Adamax": lambda ps: torch.optim.Adamax(ps, 0.01),
    "Adadelta": lambda ps: torch.optim.Adadelta(ps, 0.01),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, 0.01),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, 0.01),
    "ASGD": lambda ps: torch.optim.ASGD(ps, 0.01),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, 0.01, centered=True, momentum=0.9),
    "Rprop": lambda ps: torch.optim.Rprop(ps, 0.01),
    "SGD": lambda ps: torch.optim.SGD(ps, 0.01),
    "momentum": lambda ps: torch.optim.SGD(ps, 0.01, momentum=0.9),
}


def saved(path: Path, make: Callable[[Any], torch.optim.Optimizer]) -> Path:
    model = network()
    optimizer = make(model.parameters())
    stepped(model, optimizer)
    hdet.save(path, model=model, optimizer=optimizer)
    return path


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizers_own_state_is_taken(tmp_path: Path, name: str) -> None:
    path, whole = tmp_path / "run.pt", network()
    optimizer = OPTIMIZERS[name](whole.parameters())
    stepped(whole, optimizer)
    hdet.save(path, model=whole, optimizer=optimizer)
    model = network(1)
    resumed = OPTIMIZERS[name](model.parameters())
    hdet.load(path, model=model, optimizer=resumed)
    for parts in ((whole, optimizer), (model, resumed)):
        stepped(*parts)
    assert snapshot(model=model, optimizer=resumed) == snapshot(model=whole, optimizer=optimizer)


@pytest.mark.parametrize(
    ("of", "into", "words"),
    [
        ("Adam", "NAdam", r"does not fit \(KeyError: 'mu_product'\)"),
        ("momentum", "Adam", r"does not fit.*KeyError: 'step'"),
    ],
)
def test_the_state_of_another_optimizer_is_refused(tmp_path: Path, of: str, into: str, words: str) -> None:
    path, model = saved(tmp_path / "run.pt", OPTIMIZERS[of]), network(1)
    refused(
        path,
        f"the checkpoint's state of 'optimizer' .*{words}",
        model=model,
        optimizer=OPTIMIZERS[into](model.parameters()),
    )


def test_every_pair_of_optimizers_loads_all_or_changes_nothing(tmp_path: Path) -> None:
    for of, make in OPTIMIZERS.items():
        path = saved(tmp_path / f"{of}.pt", make)
        for into, other in OPTIMIZERS.items():
            model = network(1)
            optimizer = other(model.parameters())
            before = snapshot(model=model, optimizer=optimizer)
            try:
                hdet.load(path, model=model, optimizer=optimizer)
            except hdet.ArgumentError:
                assert snapshot(model=model, optimizer=optimizer) == before, f"{of} into {into}"
                assert of != into
            else:
                assert frozen(optimizer.state_dict()["state"]) == memory_in(path)
                if of == into:
                    stepped(model, optimizer)


def memory_in(path: Path) -> Any:
    return frozen(checkpoint_file.read(path)["states"]["optimizer"]["state"])


def memory(content: dict[str, Any], parameter: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = content["states"]["optimizer"]["state"][parameter]
    return found


def test_states_that_are_none_of_an_optimizer(tmp_path: Path) -> None:
    changes: dict[str, Callable[[dict[str, Any]], object]] = {
        r"does not fit \(\w+Error": lambda c: c["states"]["optimizer"].update(state=None),
        r"does not fit.*\(TypeError": lambda c: c["states"]["optimizer"]["param_groups"][0].update(params=3),
    }
    for words, change in changes.items():
        path = rewritten(saved(tmp_path / "run.pt", OPTIMIZERS["Adam"]), change)
        model = network(1)
        refused(path, words, model=model, optimizer=OPTIMIZERS["Adam"](model.parameters()))


def test_options_are_the_files_as_in_torch(tmp_path: Path) -> None:
    """AMSGrad into plain Adam becomes AMSGrad; a state that was written by an old torch has numbers as steps."""
    path, model = saved(tmp_path / "run.pt", OPTIMIZERS["AMSGrad"]), network(1)
    rewritten(path, lambda c: [memory(c, i).update(step=2.0) for i in range(3)])
    optimizer = OPTIMIZERS["Adam"](model.parameters())
    hdet.load(path, model=model, optimizer=optimizer)
    assert optimizer.param_groups[0]["amsgrad"]
    stepped(model, optimizer)


def test_options_for_devices_are_no_reason(tmp_path: Path) -> None:
    """A file of a run on a GPU can be read without one."""
    path, model = saved(tmp_path / "run.pt", OPTIMIZERS["Adam"]), network(1)
    rewritten(path, lambda c: c["states"]["optimizer"]["param_groups"][0].update(capturable=True, fused=True))
    optimizer = OPTIMIZERS["Adam"](model.parameters())
    hdet.load(path, model=model, optimizer=optimizer)
    assert optimizer.param_groups[0]["capturable"]


def test_parameters_without_a_memory_and_of_all_kinds(tmp_path: Path) -> None:
    """Frozen ones, scalars, empty and complex ones, half precision, names, and groups with options of their own."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scalar = nn.Parameter(torch.tensor(1.0))
            self.empty = nn.Parameter(torch.ones(0, 3))
            self.small = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
            self.wide = nn.Parameter(torch.ones(2, 3, 200, 300))
            self.wave = nn.Parameter(torch.ones(3, dtype=torch.complex64))
            self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Odd()
        named = list(model.named_parameters())
        groups = [{"params": named[:2], "lr": 0.1}, {"params": named[2:], "weight_decay": 0.1}]
        return model, torch.optim.Adam(groups, 0.01)

    model, optimizer = build()
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    optimizer.step()
    hdet.save(tmp_path / "run.pt", model=model, optimizer=optimizer)
    other, resumed = build()
    hdet.load(tmp_path / "run.pt", model=other, optimizer=resumed)
    assert snapshot(model=other, optimizer=resumed) == snapshot(model=model, optimizer=optimizer)


class Noisy(torch.optim.SGD):
    """Draws random numbers in every step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["noise"] = torch.randn_like(p)
        return super().step(closure)


def test_nothing_of_the_users_is_touched_by_looking(tmp_path: Path) -> None:
    """Neither generators nor parameters nor hooks on all optimizers."""
    path, model = saved(tmp_path / "run.pt", lambda ps: Noisy(ps, 0.01)), network(1)
    optimizer = Noisy(model.parameters(), 0.01)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    calls: list[object] = []
    handles = [
        register(lambda *args: calls.append(args))
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
    ]
    generator, versions = torch.get_rng_state(), [p._version for p in model.parameters()]
    try:
        hdet.load(path, optimizer=optimizer, ignore=["model"])
    finally:
        for handle in handles:
            handle.remove()
    assert torch.equal(torch.get_rng_state(), generator)
    assert [p._version for p in model.parameters()] == versions
    assert all(bool((p.grad == 1).all()) for p in model.parameters() if p.grad is not None)
    assert not calls


# -- classes of the user's own ----------------------------------------------------------------------------------------


class Own(torch.optim.SGD):
    """Needs an argument that its defaults do not have, and may refuse what another one remembers."""

    def __init__(self, params: Any, *, secret: int) -> None:
        super().__init__(params, lr=0.1)
        self.secret = secret

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if getattr(self, "secret", 0) < 0 and self.param_groups[0]["lr"] == 0.1:
            raise KeyError("mu_product")


def test_an_optimizer_that_cannot_be_built_is_loaded_all_the_same(tmp_path: Path) -> None:
    path, model = saved(tmp_path / "run.pt", lambda ps: Own(ps, secret=1)), network(1)
    hdet.load(path, model=model, optimizer=Own(model.parameters(), secret=1))
    whole = network()
    optimizer = torch.optim.LBFGS(whole.parameters(), 0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = whole(torch.ones(2, 300)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    hdet.save(path, model=whole, optimizer=optimizer)
    resumed = torch.optim.LBFGS(model.parameters(), 0.1)
    hdet.load(path, model=model, optimizer=resumed)
    assert snapshot(model=model, optimizer=resumed) == snapshot(model=whole, optimizer=optimizer)
    refused(path, r"does not fit", model=model, optimizer=OPTIMIZERS["Adam"](model.parameters()))


class Wrapper(torch.optim.SGD):
    """Keeps its state in a form of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"inside": super().state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict["inside"])


def test_states_in_a_form_of_their_own_are_taken(tmp_path: Path) -> None:
    path, model = saved(tmp_path / "run.pt", lambda ps: Wrapper(ps, 0.1, momentum=0.9)), network(1)
    optimizer = Wrapper(model.parameters(), 0.2)
    hdet.load(path, model=model, optimizer=optimizer)
    assert optimizer.param_groups[0]["momentum"] == 0.9
    rewritten(path, lambda content: content["states"].update(optimizer=content["states"]["optimizer"]["inside"]))
    plain = torch.optim.SGD(model.parameters(), 0.2)
    plain.register_load_state_dict_pre_hook(lambda _, state: {**state, "param_groups": state["groups"]})
    rewritten(path, lambda c: c["states"]["optimizer"].update(groups=c["states"]["optimizer"].pop("param_groups")))
    hdet.load(path, model=model, optimizer=plain)
    assert plain.param_groups[0]["momentum"] == 0.9


def test_what_was_loaded_is_put_back(tmp_path: Path) -> None:
    path, model = saved(tmp_path / "run.pt", lambda ps: Own(ps, secret=1)), network(1)
    rewritten(path, lambda content: content["states"].update(late=content["states"]["optimizer"]))
    late, optimizer = Own(network(1).parameters(), secret=1), Own(model.parameters(), secret=-1)
    optimizer.param_groups[0]["lr"] = 0.2
    parts = {"model": model, "optimizer": optimizer, "late": late}
    before = snapshot(**parts)
    with pytest.raises(
        hdet.ArgumentError,
        match=r"the checkpoint's state of 'optimizer' does not fit \(KeyError: 'mu_product'\); "
        "build the parts as they were",
    ):
        hdet.load(path, **parts)
    assert snapshot(**parts) == before


# -- schedulers, searches and scalers ---------------------------------------------------------------------------------


def test_a_search_that_does_not_fit(tmp_path: Path) -> None:
    run = Searching().go(0, 20)
    changes: dict[str, Callable[[dict[str, Any]], object]] = {
        "KeyError: 'losses'": lambda search: search.pop("losses"),
        "KeyError: 'measure'": lambda search: search.pop("measure"),
        "KeyError: 'weights'": lambda search: search["snapshots"][0][1].pop("weights"),
        "it holds tensors of shapes": lambda search: search["measure"]["origin"].pop(),
        "it is of step 19, the scheduler is at 20": lambda search: search.update(step=19),
        "invalid literal": lambda search: search["measure"].update(path_steps="many"),
    }
    for words, change in changes.items():
        run.save(tmp_path / "run.pt")
        rewritten(tmp_path / "run.pt", lambda content, change=change: change(content["searches"]["scheduler"]))
        refused(tmp_path / "run.pt", f"the state of a search does not fit.*{words}", **Searching(seed=1).parts)


def test_a_scaler_and_schedulers_of_torch(tmp_path: Path) -> None:
    path, model = tmp_path / "run.pt", network()
    optimizer = OPTIMIZERS["Adam"](model.parameters())

    def sequence() -> lr_scheduler.SequentialLR:
        rows = [lr_scheduler.ConstantLR(optimizer) for _ in range(2)]
        return lr_scheduler.SequentialLR(optimizer, rows, milestones=[5])

    parts = {"model": model, "scheduler": sequence(), "scaler": torch.amp.GradScaler("cpu")}
    changes: dict[str, Callable[[dict[str, Any]], object]] = {
        r"'scaler' does not fit.*\(KeyError": lambda s: s["scaler"].pop("growth_factor"),
        "'scaler' does not fit": lambda s: s.update(scaler=[1]),
        "'scheduler' does not fit": lambda s: s["scheduler"].update(_schedulers=[3, 4]),
    }
    for words, change in changes.items():
        hdet.save(path, **parts)
        rewritten(path, lambda content, change=change: change(content["states"]))
        other = {"model": network(1), "scheduler": sequence(), "scaler": torch.amp.GradScaler("cpu", init_scale=2.0)}
        refused(path, words, **other)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.MultiStepLR(o, [3, 6, 6], 0.1),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.ConstantLR(o), lr_scheduler.MultiStepLR(o, [2], 0.5)], milestones=[5]
        ),
        lambda o: lr_scheduler.ReduceLROnPlateau(o),
        lambda o: hdet.auto(o, schedule=lr_scheduler.MultiStepLR(o, [30, 60], 0.1), total_steps=100),
        lambda o: hdet.Ensemble(o, lr_scheduler.MultiStepLR(o, [3, 6], 0.1)),
    ],
    ids=["MultiStepLR", "SequentialLR", "ReduceLROnPlateau", "hdet.auto", "hdet.Ensemble"],
)
def test_any_scheduler_is_put_back(tmp_path: Path, make: Callable[[torch.optim.Optimizer], Any]) -> None:
    """Also dicts whose update() counts, as that of milestones does, and what only the file's state has."""
    path = tmp_path / "run.pt"
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    parts = {"model": model, "optimizer": optimizer, "scheduler": make(optimizer), "ema": nn.Linear(3, 3)}
    hdet.save(path, **parts)
    rewritten(path, lambda content: content["states"]["scheduler"].update(of_another_version=3))
    kinds = {key: type(value) for key, value in parts["scheduler"].state_dict().items()}
    refused(path, "'ema' does not fit|size mismatch", **{**parts, "ema": nn.Linear(5, 5)})
    assert {key: type(value) for key, value in parts["scheduler"].state_dict().items()} == kinds
    hdet.load(path, **parts)


# -- flipped bits, sealed again ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_flipped_and_sealed_again(tmp_path: Path) -> None:
    """As if a writer had been wrong: the checksum fits. Half of the bits are where names and numbers stand."""
    path, dice = tmp_path / "run.pt", random.Random(0)
    Searching().go(0, 20).save(path, scaler=torch.amp.GradScaler("cpu"))
    mark = checkpoint_file._MARK
    body, _, _ = path.read_bytes().rpartition(mark)
    names = body.index(b"data.pkl"), body.index(b"byteorder")
    fresh, outcomes = Searching(seed=1), {True: 0, False: 0}
    parts = {**fresh.parts, "scaler": torch.amp.GradScaler("cpu", init_scale=2.0)}
    before = snapshot(**parts)
    for number in range(300):
        damaged = bytearray(body)
        damaged[dice.randrange(*names) if number % 2 else dice.randrange(len(body))] ^= 1 << dice.randrange(8)
        path.write_bytes(damaged + mark + sha256(damaged).hexdigest().encode() + b"\n")
        try:
            hdet.load(path, **parts)
        except hdet.HdetError:
            assert snapshot(**parts) == before, f"flip {number}"
            outcomes[False] += 1
        else:
            outcomes[True] += 1
            fresh = Searching(seed=1)
            parts = {**fresh.parts, "scaler": torch.amp.GradScaler("cpu", init_scale=2.0)}
    assert min(outcomes.values()) > 50
