"""``hdet.auto`` on a stack: a search for every run, by the library's own rule. What the library does to one model.

Gradients and losses are summed up and kept on the device; the host looks at them where rounds end. Rules with other
numbers, without losses, with coins in place of what they see, and plain schedules may train side by side.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from shapes import PEAK, Factors, factors, trapezoid
from stacked import Batch, Optimizer, Stack, TrainStep
from torch import Tensor

from hdet.rule.constants import DEFAULT, LIMITS, Constants, Limits
from hdet.rule.decision import STOPPED, Decision, Evidence, Rule, is_sampled, next_end
from hdet.rule.enums import Action, Phase
from hdet.rule.estimate import Measured as Shown
from hdet.rule.estimate import Sums, balance, estimate, straightness, typical_norm
from hdet.rule.judge import Block, blocks_of
from hdet.rule.progress import Progress

_TOGETHER = 64
"""Runs measured in one call; bounds memory."""
_SLOTS = 2

Place = tuple[int, int]
"""Seed and configuration of a run in its stack."""


class Measured(NamedTuple):
    """What the device tells of a round."""

    way: float
    """How far the weights have come since the search began ..."""
    norm: float
    """... and how long they were then."""
    sums: Sums | None
    """None: they are no numbers."""
    losses: list[float]
    """Of each step."""
    sizes: list[float]
    """Logarithms of the gradients' largest numbers, of each step that was sampled."""
    groups: tuple[float, ...] = ()
    """The straightness of the way of each parameter group by itself."""
    typical: float = 0.0
    """The typical norm of the weights, if it is known."""


class Run:
    """One run: its rule, and where it stands.

    Args:
        steps: S.
        guess: the user's rate.
        searches: whether the rate is searched; if not, the schedule is followed at the guess.
        losses: whether ``scheduler.step(loss)`` is given losses. ``scheduler.step()`` alone is not: then the logarithms
            of gradients' sizes take their place.
        shape: the schedule, by the number of steps. A search holds its rise at 1.
        rise: the share of the run in which it rises.
        placebo: a control: coins say whether the gradients ask for as much as they can get or for nothing, and the
            losses are those of any round so far. A name for its random numbers; None: it sees what there is.
        ratios: factors on the rates of parameter groups, by their names; 1 for those that are not named. The rule sees
            the rate without them.
        constants, limits: the rule's numbers.
    """

    def __init__(
        self,
        steps: int,
        guess: float,
        *,
        searches: bool = True,
        losses: bool = True,
        shape: Callable[[int], Factors] = trapezoid,
        rise: float = PEAK,
        placebo: str | None = None,
        ratios: Mapping[str, float] | None = None,
        constants: Constants = DEFAULT,
        limits: Limits = LIMITS,
    ) -> None:
        self.steps, self.guess, self.losses, self.ratios = steps, guess, losses, ratios or {}
        self.rule = Rule(steps, constants, limits)
        self.state = self.rule.begin() if searches else STOPPED
        self.searched = self.state.phase is not Phase.STOPPED
        """Whether it has rounds at all."""
        self.begun, self.end = 0, 1
        """The round that it is in."""
        self.decisions: list[tuple[int, Decision]] = []
        """After which step, and what."""
        self.heard: list[Measured] = []
        """What each round has shown, so that another rule can be asked about it (behaviour.py)."""
        self.straight: list[tuple[float, ...]] = []
        """After each round until the schedule falls, the straightness of each parameter group's way."""
        self._plain, self._peak = shape(steps), rise * steps - 1
        self._held = np.where(np.arange(steps + 1) < self._peak, 1.0, self._plain)
        self._dice = None if placebo is None else random.Random(f"placebo {placebo}")
        self._rounds: list[tuple[Block, ...]] = []
        self._stretch = 0
        """Steps since the way began."""
        self._falling = False
        self._progress = Progress()
        self._typical = 1.0
        """The typical norm of the weights over their norm."""

    @property
    def sampled(self) -> list[bool]:
        """At each step of the round, whether its gradient is sampled."""
        length = self.end - self.begun
        return [is_sampled(step, length, self.rule.constants) for step in range(length)]

    def begin_round(self) -> None:
        """The next one. A first step that is measured is a round; the last two end before and after the last step."""
        first = self.state.phase is Phase.FIRST
        following = self.end + 1 if first else next_end(self.end, self.rule.constants)
        self.begun, self.end = self.end, min(following, max(self.steps - 1, self.end + 1))

    @property
    def shape(self) -> Factors:
        """The schedule at steps 0 ... S: its rise is held at 1, unless the guess is kept to."""
        return self._plain if self.state.phase is Phase.STOPPED else self._held

    @property
    def found(self) -> float:
        """The peak rate that the run has found."""
        return self.guess * self.state.peak_factor

    @property
    def rolled_back(self) -> int:
        """How often."""
        return sum(decision.action is Action.ROLL_BACK for _, decision in self.decisions)

    def rates(self, begin: int, end: int) -> Factors:
        """Of the steps from ``begin`` on, as things stand."""
        steps = np.arange(begin, end)
        return self.guess * factors(self.state, steps, self.rule.constants) * self.shape[begin:end]

    def after_round(self, measured: Measured) -> Decision:
        """What follows from the round."""
        self.heard.append(measured)
        begin, end = self.begun, self.end
        self._stretch += end - begin
        sums = measured.sums or Sums(0.0, 0.0, 0.0)
        rate, straight, turned = estimate(sums), straightness(sums), balance(sums)
        estimated_log_factor = math.log(rate / (self.guess * self.shape[end - 1])) if rate > 0 else -math.inf
        blocks = blocks_of(measured.losses) if self.losses else self._judged(measured.sizes)
        if self._dice is not None:
            self._rounds.append(blocks)
            blocks = self._dice.choice(self._rounds)
            estimated_log_factor, straight = -math.inf, float(self._dice.random() < 0.5)
            turned = self._dice.choice([-1.0, 1.0])
        progress = self._progress.after(blocks, end) if self.losses else self._progress
        evidence = Evidence(
            end=end,
            steps=end - begin,
            blocks=blocks,
            peak=self._peak,
            schedule_share=float(self.shape[end]),
            measured=Shown(
                moved=self._moved(measured),
                distance=measured.way,
                straightness=straight,
                balance=turned,
                gradients=tuple(map(math.exp, measured.sizes)) if measured.sums is not None else (),
                rates=sums.rates,
                path_steps=self._stretch,
            ),
            log_guess=math.log(self.guess * self.shape[end - 1]),
            estimated_log_factor=estimated_log_factor,
            has_losses=self.losses,
            **progress.outlook(),
        )
        decision = self.rule.after_round(self.state, evidence)
        self.state = decision.state
        self.decisions.append((end, decision))
        self._progress = decision.progress(self._progress, evidence)
        self._falling = evidence.schedule_share < self.rule.constants.fall_start
        if self.state.phase is Phase.SEARCHING and not self._falling:
            self.straight.append(measured.groups)
        if decision.resets_path or measured.sums is None:
            self._stretch = 0
        return decision

    def _moved(self, measured: Measured) -> float:
        """Over the typical norm of the weights, by the first step."""
        if self.state.phase is Phase.FIRST and 0 < measured.typical < math.inf and measured.norm > 0:
            self._typical = measured.typical / measured.norm
        moved = measured.way / (self._typical * measured.norm or 1.0)
        return moved if math.isfinite(moved) else math.inf

    def _judged(self, sizes: Sequence[float]) -> tuple[Block, ...]:
        """Once the schedule falls, no gradients are looked at any more."""
        looks = self.state.phase is Phase.SEARCHING and not self._falling
        return tuple(Block(size, 1) for size in sizes) if looks else ()


class _Reaches:
    """The sums of :mod:`hdet.rule.estimate` for all runs, on the device."""

    def __init__(self, theta: Tensor, groups: Sequence[int]) -> None:
        self._pull, self._groups = torch.zeros_like(theta), list(groups)
        self._numerators = torch.zeros(*theta.shape[:2], len(groups), device=theta.device, dtype=theta.dtype)
        """Of each parameter group by itself."""
        self._sums = torch.zeros(6, *theta.shape[:2], device=theta.device, dtype=theta.dtype)
        """asked, rates, the rate of the last sample, for a straight way sums of rates before it and of weights, and the
        sum of absolute values of what is asked"""

    def before_step(self, origin: Tensor, theta: Tensor, gradient: Tensor, rate: Tensor, sampled: Tensor) -> None:
        """The step at ``rate`` [seed, configuration] is about to be made; ``sampled``: 1, or 0 where it is not."""
        numerator, rates, last, ahead, weight, absolute = self._sums
        kept = torch.where((last > 0) & (sampled > 0), (last / rate).square().clamp(max=1), 1.0)
        products = gradient * (origin - theta)
        along = products.sum(-1)
        numerator.mul_(kept).add_(sampled * along)
        absolute.mul_(kept).add_(sampled * along.abs())
        self._numerators.mul_(kept[..., None]).add_(sampled[..., None] * self._by_group(products))
        self._pull.mul_(kept[..., None]).add_(sampled[..., None] * gradient)
        ahead.mul_(kept).add_(sampled * rates)
        weight.mul_(kept).add_(sampled)
        rates.add_(rate)
        last.copy_(torch.where(sampled > 0, rate, last))

    def measured(self, places: tuple[Tensor, Tensor], origin: Tensor, theta: Tensor) -> Tensor:
        """[5 + group, run] of some runs: as ``Sums`` has them, and the straightness of each group."""
        products = self._pull[places] * (origin - theta)
        numerator, rates, _, ahead, weight, absolute = self._sums[:, places[0], places[1]]
        own = self._numerators[places].clamp(min=0) / self._by_group(products).clamp(min=0)
        straight = (own * (rates * weight / ahead)[:, None]).nan_to_num(0, 0, 0)
        sums = torch.stack([numerator, products.sum(-1), rates, ahead / weight, absolute])
        return torch.cat([sums, straight.T])

    def _by_group(self, products: Tensor) -> Tensor:
        """[..., group]: sums over the weights of each."""
        return torch.stack([part.sum(-1) for part in products.split(self._groups, -1)], -1)

    def reset(self, places: tuple[Tensor, Tensor]) -> None:
        """The ways of some runs begin anew."""
        self._pull[places] = self._numerators[places] = 0
        self._sums[:, places[0], places[1]] = 0


class AutoRuns:
    """All runs of a stack under their rules.

    Args:
        stack: the runs' weights.
        optimizer: whose state is kept and put back with them.
        runs: ``runs[seed][configuration]``, all of the same length.
    """

    def __init__(self, stack: Stack, optimizer: Optimizer, runs: Sequence[Sequence[Run]]) -> None:
        self._stack, self._optimizer = stack, optimizer
        self.runs = {(u, k): run for u, row in enumerate(runs) for k, run in enumerate(row)}
        steps, theta = runs[0][0].steps, stack.theta
        self._start, self._origin = theta.clone(), theta.clone()
        sizes = torch.tensor([piece.size for piece in stack.layout])
        self._sizes = sizes.tolist()
        self._tensor_of = torch.repeat_interleave(torch.arange(len(sizes)), sizes).to(theta.device)
        """Which tensor each number belongs to."""
        self._snapshots = [[torch.zeros_like(tensor) for tensor in self._tensors] for _ in range(_SLOTS)]
        self._reaches = _Reaches(theta, stack.sizes)
        self._sampled = torch.zeros(steps, *theta.shape[:2], device=theta.device, dtype=theta.dtype)
        self._mark_sampled([place for place, run in self.runs.items() if run.searched])
        self._history = torch.zeros(2, *self._sampled.shape, device=theta.device, dtype=theta.dtype)
        """[what, step, seed, configuration]: losses, and logarithms of gradients' sizes."""
        self._clock = torch.zeros(1, dtype=torch.long, device=theta.device)
        ratios = [[[run.ratios.get(name, 1.0) for name in stack.group_names] for run in row] for row in runs]
        self._ratios = torch.tensor(ratios, device=theta.device, dtype=theta.dtype)
        """[seed, configuration, group]: of the rates to that which the rule sees."""
        self.rates = torch.zeros(*self._sampled.shape, len(stack.sizes), device=theta.device, dtype=theta.dtype)
        """[step, seed, configuration, group]: for TrainStep. Those after the end of a run's round are not yet right."""
        self._write_rates(0, steps, list(self.runs))

    @property
    def losses(self) -> Tensor:
        """[step, seed, configuration] of the steps so far."""
        return self._history[0]

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        """Everything that training changes."""
        return (self._stack.theta, *self._optimizer.state)

    def train_step(self, batches: Batch, graph: bool = True) -> TrainStep:
        """The step of all runs, ready for the first one."""
        before, after = self._before_step, self._after_step
        step = TrainStep(self._stack, self._optimizer, batches, self.rates, before=before, after=after, graph=graph)
        self._reaches.reset(self._indices(list(self.runs)))  # what its capture has left
        self._clock.zero_()
        return step

    def _before_step(self, gradient: Tensor, rate: Tensor) -> None:
        """On the device, before each update."""
        sampled = self._sampled.index_select(0, self._clock)[0]
        self._history[1].index_copy_(0, self._clock, gradient.abs().amax(-1).log()[None])
        own = rate[..., 0] / self._ratios[..., 0]
        self._reaches.before_step(self._origin, self._stack.theta, gradient, own, sampled)

    def _after_step(self, losses: Tensor) -> None:
        """On the device, after each update."""
        self._history[0].index_copy_(0, self._clock, losses[None])
        self._clock += 1

    @torch.no_grad()
    def end_rounds(self, t: int) -> None:
        """``t`` steps have been made: decide for the runs whose round ends here, and carry it out."""
        due = [place for place, run in self.runs.items() if run.searched and run.end == t]
        if not due:
            return
        decisions = {}
        for place, measured in self._measured(t, due).items():
            decision = self.runs[place].after_round(measured)
            decisions[place] = decision._replace(resets_path=decision.resets_path or measured.sums is None)
            self.runs[place].begin_round()
        self._carry_out(decisions)
        if t < self.runs[due[0]].steps:
            self._mark_sampled(due)
            self._write_rates(t, max(self.runs[place].end for place in due), due)

    def _mark_sampled(self, places: list[Place]) -> None:
        """Of the round that some runs are in."""
        for u, k in places:
            run = self.runs[u, k]
            self._sampled[run.begun : run.end, u, k] = torch.tensor(run.sampled).to(self._sampled)

    def _measured(self, t: int, places: list[Place]) -> dict[Place, Measured]:
        """What the rounds that end at ``t`` have shown, by one synchronisation."""
        first = min(self.runs[place].begun for place in places)
        parts = []
        for some in self._chunks(places):
            origin, now = self._origin[some], self._stack.theta[some]
            lengths = torch.stack([(now - origin).norm(dim=-1), origin.norm(dim=-1)])
            history = self._history[:, first:t, some[0], some[1]]
            parts.append(torch.cat([lengths, self._reaches.measured(some, origin, now), *history]))
        found = dict(zip(places, torch.cat(parts, 1).T.double().tolist(), strict=True))
        typical = self._typical_norms([place for place in places if self.runs[place].state.phase is Phase.FIRST])
        return {
            place: self._told(place, row, self.runs[place].begun - first)._replace(typical=typical.get(place, 0.0))
            for place, row in found.items()
        }

    def _typical_norms(self, places: list[Place]) -> dict[Place, float]:
        """Of the origin, by which tensors have moved since."""
        found: list[list[list[float]]] = []
        for some in self._chunks(places) if places else ():
            origin, now = self._origin[some], self._stack.theta[some]
            squares = torch.zeros(2, len(origin), len(self._sizes), device=origin.device, dtype=torch.double)
            both = torch.stack([origin, now - origin]).double().square()
            squares.index_add_(2, self._tensor_of, both)
            found += squares.sqrt().transpose(0, 1).tolist()
        return {place: typical_norm(self._sizes, *row) for place, row in zip(places, found, strict=True)}

    def _told(self, place: Place, row: list[float], skipped: int) -> Measured:
        """One run: way and norm, sums, groups, losses and sizes of steps; the first of these are of earlier rounds."""
        rest = 7 + len(self._stack.sizes)
        (way, norm), sums, groups, history = row[:2], row[2:7], row[7:rest], row[rest:]
        losses, sizes = (history[skipped : len(history) // 2], history[len(history) // 2 + skipped :])
        constants, length = self.runs[place].rule.constants, len(losses)
        return Measured(
            way,
            norm,
            Sums(*sums) if all(map(math.isfinite, sums)) else None,
            losses,
            [size for step, size in enumerate(sizes) if is_sampled(step, length, constants)],
            tuple(groups),
        )

    def _carry_out(self, decisions: dict[Place, Decision]) -> None:
        """Do with the weights what was decided."""

        def those(action: Action, slot: int | None = None) -> list[Place]:
            return [place for place, one in decisions.items() if (one.action, one.slot) == (action, slot)]

        for slot, snapshot in enumerate(self._snapshots):
            self._copy(self._tensors, snapshot, those(Action.KEEP, slot))
            self._copy(snapshot, self._tensors, those(Action.ROLL_BACK, slot))
        self._copy([self._start], [self._stack.theta], those(Action.RESTART))
        for some in self._chunks(those(Action.RESTART)):
            for tensor in self._optimizer.state:
                tensor[some] = 0
        resets_path = [place for place, one in decisions.items() if one.resets_path]
        self._copy([self._stack.theta], [self._origin], resets_path)
        for some in self._chunks(resets_path):
            self._reaches.reset(some)

    def _copy(self, sources: Sequence[Tensor], targets: Sequence[Tensor], places: list[Place]) -> None:
        for some in self._chunks(places):
            for source, target in zip(sources, targets, strict=True):
                target[some] = source[some]

    def _write_rates(self, begin: int, end: int, places: list[Place]) -> None:
        """The rates of some runs, as things stand."""
        if begin < end:
            table = np.stack([self.runs[place].rates(begin, end) for place in places], 1)
            seeds, columns = self._indices(places)
            common = torch.from_numpy(table).to(self.rates)[..., None]
            self.rates[begin:end, seeds, columns] = common * self._ratios[seeds, columns]

    def _chunks(self, places: list[Place]) -> Iterator[tuple[Tensor, Tensor]]:
        """Some at a time."""
        for first in range(0, len(places), _TOGETHER):
            yield self._indices(places[first : first + _TOGETHER])

    def _indices(self, places: list[Place]) -> tuple[Tensor, Tensor]:
        seeds, columns = torch.tensor(places, device=self._stack.device).T
        return seeds, columns
