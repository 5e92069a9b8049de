"""lab/experiments/real/models, problems and pools: what each says that it does. Stand-ins only."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from real.data import CHARACTERS, WORDS, stand_in
from real.models.convolutions import CausalText, NameCNN, UNet
from real.models.llama import Llama
from real.models.perceptrons import VAE, Experts, Flow, MessageNet, Mixer, Perceptron, Sines
from real.models.recurrent import Oscillators, StateSpace
from real.models.tables import ComplEx
from real.models.transformers import Encoder
from real.models.weights import drawn
from real.pools import Crops, Made, Masked, Noised, Rows, Skips, Stretches, Views, frozen
from real.problems import made, science, texts
from real.task import RealTask
from real.workloads import WORKLOADS
from torch import nn

from lab.tasks.streams import generator_of


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


def test_convolutions_over_names_are_torchs() -> None:
    model = NameCNN(28, 24)
    drawn(model, seeded(), table=0.3)
    names = torch.randint(28, (4, 16), generator=seeded())
    x = model.letters(names).mT
    for layer in (model.first, model.second):
        kernel = layer.weight.unflatten(1, (3, -1)).mT  # [output, input, place]
        x = torch.relu(torch.conv1d(x, kernel, layer.bias, padding=1))
    torch.testing.assert_close(model(names), model.head(x.amax(-1)))


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


def test_a_flow_reports_nats_per_number() -> None:
    one = task("weather-flow")
    hours, noise = one.batch(0, 0)
    with torch.no_grad():
        model = one.model(0)
        for p in model.parameters():
            p.zero_()  # the identity
        loss = one.loss(model, (hours, noise))
    x = hours + 0.02 * noise.float()
    torch.testing.assert_close(loss, -torch.distributions.Normal(0, 1).log_prob(x).mean())


def test_the_divergence_of_causes() -> None:
    model = VAE(8, causes=2)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        model.encoder.head.bias.copy_(torch.tensor([1.0, 0.0, 0.0, math.log(4)]))
    _, divergence = model(torch.zeros(1, 8), torch.zeros(1, 2))
    normal = torch.distributions.Normal
    wide = normal(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 2.0]))
    expected = torch.distributions.kl_divergence(wide, normal(0.0, 1.0)).sum()
    torch.testing.assert_close(divergence[0], expected)


def test_sines_are_as_wide_in_every_layer() -> None:
    model = Sines().drawn(seeded())
    x, widths = 2 * torch.rand(4096, 2, generator=seeded()) - 1, []
    for layer in model.hidden:
        x = torch.sin(30 * layer(x))
        widths.append(float(x.std()))
    assert all(0.6 < width < 0.8 for width in widths)


def test_adapters_begin_as_the_model_and_only_they_train() -> None:
    one = task("shakespeare-lora")
    model, batch = one.model(0), one.batch(0, 0)
    torch.testing.assert_close(one.loss(model, batch), one.loss(texts._trained_gpt(synthetic=True), batch))
    names = [name for name, _ in model.named_parameters()]
    assert {name.rpartition(".")[2] for name in names} == {"down", "up"}
    assert len(names) == 2 * 2 * 5  # two matrices at five layers of two
    one.loss(model, batch).backward()
    assert all(p.grad.any() for name, p in model.named_parameters() if name.endswith("up"))
    capitals = (batch[0] >= texts.A) & (batch[0] <= texts.Z)
    assert not capitals.any()


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


def test_a_unet_sees_around_and_answers_for_every_point() -> None:
    model = drawn(UNet(4), seeded())
    assert model(torch.rand(2, 1, 32, 32, generator=seeded())).shape == (2, 4, 32, 32)


def test_a_mixer_mixes_patches() -> None:
    model = drawn(Mixer(64, 16, 5), seeded())
    x = torch.randn(2, 64, generator=seeded(), requires_grad=True)
    out = model(x)
    assert out.shape == (2, 16, 5)
    (slope,) = torch.autograd.grad(out[0, 0, 0], x)
    assert slope[0].all()
    assert not slope[1].any()


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


@pytest.mark.parametrize("build", [lambda: Llama(32, 16, 2, 2, 24), lambda: StateSpace(32, 7)], ids=["llama", "space"])
def test_nothing_comes_from_what_is_later(build: Any) -> None:
    model = drawn(build(), seeded(), table=0.3)
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


def test_an_encoder_looks_both_ways() -> None:
    model = drawn(Encoder(32, 12, width=16, depth=1, heads=2), seeded())
    text = torch.randint(32, (1, 12), generator=seeded())
    changed = text.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 32
    assert ((model(text) - model(changed)).abs().amax((0, 2)) > 0).all()


def test_adapters_of_an_encoder_come_with_a_new_head() -> None:
    one = task("code-lora")
    model = one.model(0)
    names = [name for name, _ in model.named_parameters()]
    assert len(names) == 2 * 3 * 5 + 2
    assert {name for name in names if "layers" not in name} == {"head.weight", "head.bias"}
    assert [group["name"] for group in one.groups(model)] == ["head", "hidden", "vectors"]
    first, second = (dict(one.model(seed).named_buffers()) for seed in (0, 1))
    assert all(torch.equal(first[key], second[key]) for key in first)


# Problems ------------------------------------------------------------------------------------------------------------


def test_an_equation_is_solved_by_its_solution() -> None:
    class Solution(nn.Module):
        def forward(self, points: torch.Tensor) -> torch.Tensor:
            return torch.sin(made.WAVES * points).prod(-1, keepdim=True)

    one = task("waves-pinn-400")
    inside, edge = one.batch(0, 0)
    batch = inside.double(), edge.double()
    assert float(one.loss(Solution(), batch)) < 1e-20
    with torch.no_grad():
        assert float(one.loss(one.model(0).double(), batch)) > 100
    assert ((edge == 0) | (edge == 1)).any(1).all()


def test_numbers_are_sorted_by_who_knows_them() -> None:
    class Sorter(nn.Module):
        def forward(self, sequence: torch.Tensor) -> torch.Tensor:
            numbers = sequence[:, : made.LENGTH].sort(-1).values
            sure = 100 * torch.nn.functional.one_hot(numbers, made.NUMBERS).float()
            return torch.cat([torch.zeros(len(sequence), made.LENGTH - 1, made.NUMBERS), sure], 1)

    one = task("sorting")
    assert float(one.loss(Sorter(), one.batch(0, 0))) < 1e-6
    assert float(one.loss(one.model(0), one.batch(0, 0)).detach()) > 3


def test_a_graph_is_trained_in_full_batches() -> None:
    one = task("blocks-graph")
    first, second = one.batch(0, 0), one.batch(0, 1)
    assert sorted(first[0].tolist()) == sorted(second[0].tolist()) == list(range(made.LABELLED))
    model = one.model(0)
    torch.testing.assert_close(one.loss(model, first), one.loss(model, second))
    (held,) = one.validation()
    assert len(held[0]) == made.NODES - made.LABELLED
    links = model.get_buffer("links")
    torch.testing.assert_close(links, links.T)


def test_a_narrow_likelihood_goes_below_zero() -> None:
    one = task("narrow-likelihood")
    x, targets = one.batch(0, 0)
    assert float(targets.abs().mean()) < 0.1

    class Right(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mean = torch.sin(2 * x[:, 0]) + x[:, 1] / 2
            wide = 0.1 + 0.4 * torch.sigmoid(2 * x[:, 2])
            return torch.stack([made.SCALE * mean, 2 * (made.SCALE * wide).log()], -1)

    assert float(one.loss(Right(), (x, targets))) < -3
    assert one.density


def test_only_tunes_are_clipped() -> None:
    assert task("tunes-convolutions").clip == 1.0
    assert task("shakespeare-gpt").clip is None


def test_pairs_that_are_found_cost_nothing() -> None:
    class Sure(nn.Module):
        def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
            return 100 * torch.eye(len(first))

    one = task("fashion-pairs")
    assert float(one.loss(Sure(), one.batch(0, 0))) < 1e-6
    assert float(one.loss(one.model(0), one.batch(0, 0)).detach()) > 2


def test_the_noise_is_what_is_asked_for() -> None:
    class Right(nn.Module):
        def __init__(self, noise: torch.Tensor) -> None:
            super().__init__()
            self.noise = noise

        def forward(self, noisy: torch.Tensor, strength: torch.Tensor) -> torch.Tensor:
            return self.noise[:, None].float()

    one = task("photos-denoiser")
    batch = one.batch(0, 0)
    assert float(one.loss(Right(batch[2]), batch)) == 0


def test_risks_are_compared_where_it_is_known_who_died_first() -> None:
    class Given(nn.Module):
        def forward(self, numbers: torch.Tensor) -> torch.Tensor:
            return numbers

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


# Pools ---------------------------------------------------------------------------------------------------------------


def test_two_views_are_of_one_image() -> None:
    images = stand_in("fashion")["train_images"]
    places = torch.arange(64)
    first, second = Views(images).take(places, seeded())
    assert first.shape == second.shape == (64, 28, 28)
    assert first.dtype == torch.uint8
    assert not torch.equal(first, second)
    flat = [view.flatten(1).double() - view.double().mean((1, 2))[:, None] for view in (first, second)]
    alike = torch.nn.functional.normalize(flat[0]) @ torch.nn.functional.normalize(flat[1]).T
    assert alike.diagonal().mean() > alike.mean() + 0.1


def test_skips_are_nearby_or_drawn_by_frequency() -> None:
    words = torch.arange(4000, dtype=torch.int16) % WORDS
    middle, others = Skips.of(words, WORDS).take(torch.arange(1000), seeded())
    away = (others[:, 0] - middle).abs()
    assert 1 <= int(away.min()) <= int(away.max()) <= 4
    assert others.shape == (1000, 6)
    often = torch.cat([torch.zeros(1600, dtype=torch.int16), torch.ones(100, dtype=torch.int16)])
    drawn_ones = Skips.of(often, WORDS).take(torch.arange(1600), seeded())[1][:, 1:].double()
    assert float(drawn_ones.max()) == 1
    assert float(drawn_ones.mean()) == pytest.approx(1 / (1 + 16**0.75), rel=0.1)


def test_a_share_of_places_is_hidden() -> None:
    rows, hidden = Masked(Rows((torch.zeros(2000, 10),)), 0.2).take(torch.arange(2000), seeded())
    assert hidden.shape == rows.shape
    assert float(hidden.double().mean()) == pytest.approx(0.2, rel=0.05)


def test_stretches_and_crops_stay_inside_and_are_cut_alike() -> None:
    long = torch.arange(60).view(2, 30)
    first, again = Stretches((long, -long), 30).take(torch.arange(2), seeded())
    assert torch.equal(first, long)
    assert torch.equal(first, -again)
    (some,) = Stretches((long,), 10).take(torch.ones(500, dtype=torch.long), seeded())
    assert (int(some.min()), int(some.max())) == (30, 59)
    images = torch.arange(2 * 90 * 80).view(2, 90, 80)
    crops, same = Crops((images, images + 1), 32).take(torch.ones(500, dtype=torch.long), seeded())
    assert torch.equal(crops + 1, same)
    rows, columns = (crops - 90 * 80) // 80, crops % 80
    assert 24 <= int(rows.min()) <= int(rows.max()) < 90 - 24
    assert 24 <= int(columns.min()) <= int(columns.max()) < 80 - 24
    assert (crops[:, 1, 0] - crops[:, 0, 0] == 80).all()


def test_noise_is_a_part_of_the_batch() -> None:
    pool = Noised(Rows((torch.arange(8),)), ((3,), ()))
    rows, wide, single = pool.take(torch.tensor([2, 5]), seeded())
    assert (rows.tolist(), wide.shape, single.shape, wide.dtype) == ([2, 5], (2, 3), (2,), torch.float16)


def test_frozen_samples_are_always_the_same() -> None:
    pool = Made(lambda count, generator: (torch.rand(count, generator=generator),))
    assert torch.equal(*(frozen(pool, "some", 16).tables[0] for _ in range(2)))
    assert not torch.equal(frozen(pool, "some", 16).tables[0], frozen(pool, "other", 16).tables[0])
    spread = frozen(Noised(Rows((torch.arange(100),)), ()), "some", 4)
    assert spread.tables[0].tolist() == [0, 25, 50, 75]


def test_plain_layers_are_linear_with_two_widths() -> None:
    model = drawn(Perceptron((4, 3)), generator_of("layers"))
    x = torch.randn(2, 4, generator=seeded())
    torch.testing.assert_close(model(x[:1] + x[1:]), model(x[:1]) + model(x[1:]))
