"""lab/experiments/real/models, problems and pools: what each says that it does. Stand-ins only."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from real.data import CHARACTERS
from real.models.convolutions import CausalText, ConvNeXt
from real.models.llama import Llama
from real.models.perceptrons import DeepSets, Experts, Flow, MessageNet, NeuralODE, runge_kutta
from real.models.recurrent import FadingAttention, LinearText, Oscillators, PlainRNN, StateSpace
from real.models.tables import ColumnAttention, ComplEx, Ordinal
from real.models.transformers import ChordTransformer, MaskedViT, patches_of
from real.models.weights import drawn
from real.pools import Made, Noised, Rows, frozen
from real.problems import images, science, small
from real.task import RealTask
from real.workloads import TEST_LARGE, WORKLOADS, Workload
from torch import nn


@cache
def task(name: str) -> RealTask:
    found = WORKLOADS[name].task(synthetic=True)
    assert isinstance(found, RealTask)
    return found


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(1)


# Models --------------------------------------------------------------------------------------------------------------


def test_convolutions_over_text_look_back_only_and_far_enough() -> None:
    model = drawn(CausalText(CHARACTERS), seeded(), table=0.3)
    text = torch.randint(CHARACTERS, (2, 40), generator=seeded())
    changed = text.clone()
    changed[:, 5] = (changed[:, 5] + 1) % CHARACTERS
    apart = (model(text) - model(changed)).abs().amax((0, 2)) > 0
    assert apart.nonzero().flatten().tolist() == list(range(5, 5 + 32))  # 1 + 1 + 2 + 4 + 8 + 16 places


def test_two_experts_answer_and_an_even_load_is_one() -> None:
    model = Experts(CHARACTERS, 16)
    drawn(model, seeded(), table=0.3)
    window = torch.randint(CHARACTERS, (64, 16), generator=seeded())
    hidden: list[torch.Tensor] = []
    model.outer.register_forward_pre_hook(lambda module, inputs: hidden.append(inputs[0]))
    logits, uneven = model(window)
    answered = hidden[0].unflatten(-1, (8, -1)).abs().sum(-1) > 0
    assert logits.shape == (64, CHARACTERS)
    assert answered.sum(-1).max() == 2
    assert 1 <= float(uneven.detach()) < 2
    with torch.no_grad():
        model.gate.weight.zero_()  # all are as likely, and all answer: four times two
    assert float(model(window)[1].detach()) == pytest.approx(4.0)


def test_a_flow_knows_how_it_changes_volumes() -> None:
    model = drawn(Flow(6), seeded()).double()
    x = torch.rand(6, dtype=torch.float64, generator=seeded())
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.weight += 0.1 * torch.randn(layer.weight.shape, generator=seeded(), dtype=torch.float64)
    jacobian = torch.func.jacrev(lambda point: model(point[None])[0][0])(x)
    expected = torch.linalg.slogdet(jacobian).logabsdet
    assert float(model(x[None])[1].detach()) == pytest.approx(float(expected.detach()), rel=1e-9)
    assert abs(float(expected.detach())) > 0.1


def test_a_message_goes_one_bond_a_round() -> None:
    model = drawn(MessageNet(13, 4, rounds=2), seeded(), table=0.3)
    atoms, bonds = torch.ones(1, 6, dtype=torch.long), torch.zeros(1, 6, 6, dtype=torch.long)
    for a, b in ((0, 1), (1, 2), (2, 3)):
        bonds[0, a, b] = bonds[0, b, a] = 1
    changed = atoms.clone()
    changed[0, 0] = 2
    apart = (model(atoms, bonds) - model(changed, bonds)).abs().amax((0, 2)) > 0
    assert apart.tolist() == [True, True, True, False, False, False]
    assert not torch.equal(model(atoms, bonds), model(atoms, 2 * bonds))  # a double bond says something else


def test_complex_numbers_are_multiplied() -> None:
    model = drawn(ComplEx(7, 3, rank=4), seeded(), table=1.0)
    entities, relations = (torch.complex(*t.weight.chunk(2, -1)) for t in (model.entities, model.relations))
    expected = torch.einsum("sr,sr,er->se", entities[:2], relations[1:], entities.conj()).real
    torch.testing.assert_close(model(torch.tensor([0, 1]), torch.tensor([1, 2])), expected)


def test_oscillators_are_a_recurrence() -> None:
    layer = Oscillators(3, states=2).double()
    with torch.no_grad():
        layer.sine.copy_(torch.randn(3, 2, generator=seeded()))
    x = torch.randn(1, 20, 3, generator=seeded(), dtype=torch.float64)
    turn = torch.exp(torch.complex(-layer.log_decay.exp(), layer.frequency))
    state, heard = torch.zeros(3, 2, dtype=torch.complex128), []
    for given in x[0]:
        state = turn * state + given[:, None]
        heard.append((layer.cosine * state.real + layer.sine * state.imag).sum(1))
    torch.testing.assert_close(layer(x)[0], torch.stack(heard))


def test_fading_attention_is_a_recurrence() -> None:
    layer = FadingAttention(6, heads=2).double()
    x = torch.randn(1, 20, 6, generator=seeded(), dtype=torch.float64)
    queries, keys, values = layer.joint(x)[0].unflatten(-1, (3, 2, 3)).unbind(1)  # each [time, head, feature]
    kept = torch.exp(-layer.log_decay.exp())[:, None, None]
    memory, read = torch.zeros(2, 3, 3, dtype=torch.float64), []
    for query, key, value in zip(queries, keys, values, strict=True):
        memory = kept * memory + key[:, :, None] * value[:, None]
        read.append(layer.norm((query[:, None] @ memory)[:, 0] / math.sqrt(3)).flatten())
    expected = layer.out(nn.functional.silu(layer.gate(x[0])) * torch.stack(read))
    torch.testing.assert_close(layer(x)[0], expected)


def notes(model: nn.Module) -> Any:
    """A model of four voices as one of a single row of numbers."""
    return lambda text: model(text[..., None].expand(-1, -1, 4)).flatten(2)


@pytest.mark.parametrize(
    ("build", "called"),
    [
        (lambda: Llama(32, 16, 2, 2, 24), lambda model: model),
        (lambda: StateSpace(32, 7), lambda model: model),
        (lambda: LinearText(32, 16, 2, 2), lambda model: model),
        (lambda: ChordTransformer(32, 12, width=16), notes),
    ],
    ids=["llama", "space", "linear", "chords"],
)
def test_nothing_comes_from_what_is_later(build: Any, called: Any) -> None:
    model = called(drawn(build(), seeded(), table=0.3))
    text = torch.randint(32, (2, 12), generator=seeded())
    changed = text.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 32
    apart = (model(text) - model(changed)).abs().amax((0, 2))
    assert not apart[:5].any()
    assert apart[5:].all()


def test_a_llama_has_fifty_million_weights_and_knows_places_by_their_distance() -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in Llama(256).parameters()) > 50_000_000
    model = Llama(32, 16, 1, 2, 24).drawn(seeded())
    text = torch.tensor([[3, 4, 3, 3, 5]])
    swapped = text[:, [1, 0, 2, 3, 4]]
    assert not torch.allclose(model(text)[:, -1], model(swapped)[:, -1], atol=1e-7)
    same = torch.full((1, 6), 3)
    torch.testing.assert_close(model(same)[:, 0], model(same)[:, -1])


def test_a_masked_autoencoder_knows_patches_by_their_places_alone() -> None:
    model = drawn(MaskedViT(9, 4, width=16), seeded(), table=0.3).double()
    shown = torch.randn(1, 4, 4, generator=seeded(), dtype=torch.float64)
    order = torch.randperm(9, generator=seeded())[None]
    again = model(shown, order)
    assert again.shape == (1, 5, 4)
    turned = torch.tensor([3, 0, 2, 1, 8, 5, 7, 4, 6])  # shown patches among themselves, hidden ones among themselves
    other = model(shown[:, turned[:4]], order[:, turned])
    torch.testing.assert_close(other, again[:, turned[4:] - 4])
    moved = model(shown, order[:, [1, 0, *range(2, 9)]])
    assert not torch.allclose(moved, again)


def test_patches_are_squares_row_by_row() -> None:
    image = torch.arange(36).view(1, 1, 6, 6)
    found = patches_of(image, 3)[0].tolist()
    assert len(found) == 4
    assert found[1] == [3, 4, 5, 9, 10, 11, 15, 16, 17]


def test_every_column_is_heard_and_has_its_own_meaning() -> None:
    model = drawn(ColumnAttention((3, 3), 2, width=16), seeded(), table=0.3)
    categories, numbers = torch.tensor([[0, 1]]), torch.tensor([[0.5, -1.0]])
    first = model(categories, numbers)
    others = [
        model(torch.tensor([[1, 1]]), numbers),
        model(torch.tensor([[0, 2]]), numbers),
        model(categories, torch.tensor([[0.6, -1.0]])),
        model(categories, torch.tensor([[0.5, -1.1]])),
        model(categories.flip(1), numbers),
        model(categories, numbers.flip(1)),
    ]
    assert len({round(float(found.detach()), 6) for found in (first, *others)}) == 7


def test_depthwise_convolutions_keep_channels_apart() -> None:
    block = drawn(ConvNeXt(), seeded()).fine[0]
    x = torch.randn(1, 24, 14, 14, generator=seeded())
    changed = x.clone()
    changed[:, 3, 7, 7] += 1
    apart = (block.depthwise(x) - block.depthwise(changed)).abs() > 0
    assert apart.any((0, 2, 3)).nonzero().flatten().tolist() == [3]
    assert int(apart.sum()) == 7 * 7


def test_adapters_of_an_encoder_come_with_a_new_head() -> None:
    one = task("code-lora")
    model = one.model(0)
    names = [name for name, _ in model.named_parameters()]
    assert len(names) == 2 * 3 * 5 + 2
    assert {name for name in names if "layers" not in name} == {"head.weight", "head.bias"}
    assert [group["name"] for group in one.groups(model)] == ["head", "hidden", "vectors"]
    first, second = (dict(one.model(seed).named_buffers()) for seed in (0, 1))
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_ordered_classes_have_the_probabilities_between_their_cuts() -> None:
    model = drawn(Ordinal(3, 5), seeded()).double()
    assert model.first.tolist() == [-1.5]
    x = torch.randn(4, 3, generator=seeded(), dtype=torch.float64)
    with torch.no_grad():
        model.log_gaps.copy_(torch.tensor([-1.0, 0.5, 0.1]))
        cuts = torch.cat([model.first, model.first + model.log_gaps.exp().cumsum(0)])
        at_most = torch.sigmoid(cuts - model.score(x))
        expected = torch.diff(at_most, prepend=torch.zeros(4, 1), append=torch.ones(4, 1))
        torch.testing.assert_close(model(x).exp(), expected)
        model.first.fill_(1e4)  # all scores lie far below all cuts
        assert model(x).isfinite().all()


def test_a_set_has_no_order_and_no_more_numbers_than_it_has() -> None:
    model = drawn(DeepSets(), seeded())
    numbers, present = torch.randn(2, 6, generator=seeded()), torch.tensor([True] * 4 + [False] * 2)
    given, order = model(numbers, present), torch.tensor([2, 0, 3, 1, 5, 4])
    torch.testing.assert_close(model(numbers[:, order], present), given)
    torch.testing.assert_close(model(numbers.masked_fill(~present, 9.0), present), given)
    assert not torch.allclose(model(numbers, torch.ones_like(present)), given)


def test_runge_kutta_is_of_fourth_order() -> None:
    """A point on a circle: halving the step divides the error of one step by 2^5."""
    start = torch.tensor([1.0, 0.0], dtype=torch.float64)
    turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    errors = []
    for length in (0.2, 0.1):
        there = torch.tensor([math.cos(length), math.sin(length)], dtype=torch.float64)
        errors.append(float((runge_kutta(lambda state: turn @ state, start, length) - there).norm()))
    assert errors[0] / errors[1] == pytest.approx(32, rel=0.01)


def test_a_path_goes_on_from_its_last_point() -> None:
    one, four = (drawn(NeuralODE(2, steps, 0.25), seeded()) for steps in (1, 4))
    state = torch.randn(3, 2, generator=seeded())
    path = four(state)
    assert path.shape == (3, 4, 2)
    for seen in path.unbind(1):
        state = one(state)[:, 0]
        torch.testing.assert_close(seen, state)


def test_a_plain_recurrence_is_that_of_torch() -> None:
    model, twin = drawn(PlainRNN(2, 8), seeded()), nn.RNN(2, 8, batch_first=True)
    x = torch.randn(3, 5, 2, generator=seeded())
    with torch.no_grad():
        for parameter, own in (
            (twin.weight_ih_l0, model.inputs.weight),
            (twin.weight_hh_l0, model.memory.weight),
            (twin.bias_ih_l0, model.inputs.bias),
            (twin.bias_hh_l0, torch.zeros(8)),
        ):
            parameter.copy_(own)
    torch.testing.assert_close(model(x), model.head(twin(x)[0][:, -1])[:, 0])


# Problems ------------------------------------------------------------------------------------------------------------


def test_only_tunes_and_sums_are_clipped() -> None:
    assert task("tunes-convolutions").clip == task("adding-rnn").clip == 1.0
    assert task("shakespeare-gpt").clip is None


class Given(nn.Module):
    """Answers with its input, or with a constant."""

    def __init__(self, answer: torch.Tensor | None = None) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return x if self.answer is None else self.answer


def test_risks_are_compared_where_it_is_known_who_died_first() -> None:
    risks, years = torch.tensor([[3.0], [1.0], [0.0]]), torch.tensor([1.0, 2.0, 3.0])
    deaths = torch.tensor([1, 0, 1], dtype=torch.uint8)
    loss = task("patients-hazard").loss(Given(), (risks, years, deaths))
    expected = (math.log1p(math.exp(-2)) + math.log1p(math.exp(-3))) / 2  # nobody outlived the third
    assert float(loss) == pytest.approx(expected)


def test_a_quantile_is_where_its_loss_is_least() -> None:
    class Constant(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.value = value

        def forward(self, past: torch.Tensor) -> torch.Tensor:
            near = torch.tensor([-1.645, -0.674, 0.0, 0.674, 1.645])
            return (self.value * near).expand(len(past), science.AHEAD, -1)

    normal = torch.randn(4000, science.PAST + science.AHEAD, generator=seeded())
    losses = [float(task("appliances-mixer").loss(Constant(value), (normal,))) for value in (0.7, 1.0, 1.4)]
    assert min(losses) == losses[1]


def test_only_hidden_atoms_count() -> None:
    one = task("molecules-messages")
    atoms, bonds, hidden = one.batch(0, 0)
    model = one.model(0)
    with torch.no_grad():
        shown = atoms.long().masked_fill(hidden & (atoms > 0), science.HIDDEN)
        sure = model(shown, bonds).log_softmax(-1).gather(-1, atoms.long()[..., None])[..., 0]
        torch.testing.assert_close(one.loss(model, (atoms, bonds, hidden)), -sure[hidden & (atoms > 0)].mean())


def test_a_deviance_is_zero_where_counts_are_guessed_and_has_the_likelihoods_gradient() -> None:
    one, time, count = task("counts-poisson"), torch.tensor([0.5, 2.0, 1.0]), torch.tensor([1.0, 4.0, 0.0])
    exact = (count / time).log().clamp(min=-50)[:, None]
    assert float(one.loss(Given(), (exact, time, count))) == pytest.approx(0, abs=1e-6)
    log_often = torch.randn(3, 1, generator=seeded(), requires_grad=True)
    (ours,) = torch.autograd.grad(one.loss(Given(), (log_often, time, count)), log_often)
    theirs = nn.functional.poisson_nll_loss(log_often[:, 0] + time.log(), count)
    torch.testing.assert_close(ours, *torch.autograd.grad(theirs, log_often))


def test_the_two_largest_are_those_of_the_set() -> None:
    numbers = torch.tensor([[1.0, -2.0, -3.0, 8.0, 9.0] + [9.0] * 5])
    loss = task("sets-largest").loss(Given(torch.tensor([0.5])), (numbers, torch.tensor([3])))
    assert float(loss) == pytest.approx((0.5 - (1 - 2)) ** 2)


def test_a_sequence_has_a_mark_in_each_half_and_their_sum() -> None:
    marked, sums = task("adding-rnn").batch(0, 0)
    numbers, marks = marked.unbind(-1)
    assert (marks.unflatten(1, (2, -1)).sum(-1) == 1).all()
    torch.testing.assert_close((numbers * marks).sum(1), sums)


def test_twins_cost_nothing_if_views_agree_and_features_do_not_repeat() -> None:
    one = task("digits-barlow")
    images, *noise = one.batch(0, 0)
    drawn_features = torch.randn(128, small.FEATURES, generator=seeded())
    apart = torch.linalg.qr(torch.cat([torch.ones(128, 1), drawn_features], 1))[0][:, 1:]  # of mean 0
    assert float(one.loss(Given(3 * apart), (images, *noise))) == pytest.approx(0, abs=1e-4)
    same = apart[:, :1].expand(-1, small.FEATURES)
    assert float(one.loss(Given(3 * same), (images, *noise))) == pytest.approx(31 * small.BESIDE, rel=1e-2)


def test_parts_share_no_name_and_no_patient() -> None:
    train, test = ({*bytes(text.tolist()).split(b"\0")} for text in small._names())
    assert len(train) > 4 * len(test) > 1000
    assert not train & test
    patients = [{tuple(row) for row in rows.tables[0].tolist()} for rows in small._patients()]
    assert [len(part) for part in patients] == [300, 142]
    assert not patients[0] & patients[1]


def test_the_law_of_a_pendulum_leaves_what_was_seen_inaccurately() -> None:
    """At both ends of a path, so twice."""
    law = NeuralODE(2, small.AHEAD, small.MOMENT)
    law.velocity.forward = small._swing  # type: ignore[method-assign]
    one = task("pendulum-ode")
    assert one.evaluate(law)["loss"] == pytest.approx(2 * small.INACCURACY**2, rel=0.1)
    starts = [small._swings(part).tables[0][:, 0] for part in ("train", "test")]
    assert not torch.isin(*starts).any()


@pytest.mark.parametrize("workload", TEST_LARGE, ids=lambda workload: workload.name)
def test_larger_models_have_so_many_weights(workload: Workload) -> None:
    assert 1e5 < sum(p.numel() for p in task(workload.name).model(0).parameters()) < 1e6


def test_only_hidden_patches_count_and_only_shown_ones_are_given() -> None:
    class Noted(nn.Module):
        def forward(self, shown: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
            self.shown, self.order = shown, order
            return hidden(order)

    def hidden(order: torch.Tensor) -> torch.Tensor:
        return patches.gather(1, order[:, images.SHOWN :, None].expand(-1, -1, images.PATCH**2))

    one, model = task("fashion-masked"), Noted()
    batch = one.batch(0, 0)
    patches = patches_of(images.bright(batch[0]), images.PATCH)
    assert float(one.loss(model, batch)) == 0
    assert model.shown.shape == (one.batch_size, images.SHOWN, images.PATCH**2)
    torch.testing.assert_close(model.shown[0], patches[0, model.order[0, : images.SHOWN]])
    assert {*model.order[0].tolist()} == {*range(images.PATCHES)}


def test_an_upscaler_is_given_means_of_squares() -> None:
    class Repeated(nn.Module):
        def forward(self, small: torch.Tensor) -> torch.Tensor:
            return small.repeat_interleave(4, 2).repeat_interleave(4, 3)

    one = task("photos-upscaled")
    squares = torch.randint(256, (2, 4, 4), generator=seeded()).to(torch.uint8)
    plain = squares.repeat_interleave(4, 1).repeat_interleave(4, 2)
    assert float(one.loss(Repeated(), (plain,))) == pytest.approx(0, abs=1e-6)
    plain[0, 0, 0] += 1 if plain[0, 0, 0] < 255 else -1
    assert float(one.loss(Repeated(), (plain,))) == pytest.approx(2 * 15 / 16 / 127.5 / 512, rel=1e-2)


def test_a_film_that_is_drawn_by_chance_and_a_new_user_do_not_count() -> None:
    class Given(nn.Module):
        def forward(self, *parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.tensor([[1.0, 7.0, 2.0]]), torch.tensor([0.5, 3.0]).expand(1, 3, 2)

    films, others = torch.tensor([[4, 5, 0, 6]]).short(), torch.tensor([[9, 6]]).short()
    expected = math.log(math.exp(1) + math.exp(0.5) + math.exp(3)) - 1 + math.log(math.exp(2) + math.exp(0.5)) - 2
    assert float(task("movielens-next").loss(Given(), (films, others))) == pytest.approx(expected / 2)


# Pools ---------------------------------------------------------------------------------------------------------------


def test_frozen_samples_are_always_the_same() -> None:
    pool = Made(lambda count, generator: (torch.rand(count, generator=generator),))
    assert torch.equal(*(frozen(pool, "some", 16).tables[0] for _ in range(2)))
    assert not torch.equal(frozen(pool, "some", 16).tables[0], frozen(pool, "other", 16).tables[0])
    spread = frozen(Noised(Rows((torch.arange(100),)), ()), "some", 4)
    assert spread.tables[0].tolist() == [0, 25, 50, 75]
