"""What the ranks of a search do together: they check that they agree, average buffers, and gather what each has seen.

After each of these all ranks know the same, so that all make the same decision. :meth:`Ranks.gather` is the end of a
round: the one place where numbers are read off the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.errors import DisagreementError
from hdet.journal.writer import JournalWriter, connect_ranks
from hdet.parameters import put_back, trained_parameters
from hdet.ranks.agreement import Agreement, Occasion, Shown, fingerprints_of
from hdet.ranks.average import average_
from hdet.ranks.group import arriving, gather_named
from hdet.ranks.rank_group import RankGroup
from hdet.ranks.shards import resharded
from hdet.ranks.weights import NO_WEIGHTS, ReplicaTensors, Weights, read
from hdet.rollback.judge import Block
from hdet.rollback.losses import Losses, merged
from hdet.search.estimate import Measured
from hdet.search.measure import Measure

__all__ = ["Gathered", "Ranks"]


class Gathered(NamedTuple):
    """What all ranks have seen in a round."""

    is_sound: bool
    """Whether all weights are finite, and no buffer is NaN."""
    losses: list[float]
    """The mean loss of each rank; NaN if it has none."""
    has_losses: bool
    """Whether any rank was given one."""
    blocks: tuple[Block, ...]
    """The losses of all ranks."""
    measured: Measured
    writer: int | None
    """The rank that writes the journal."""


class Ranks:
    """The ranks that train one model. What trains is equal on all of them; buffers may differ.

    Args:
        rank_group: who they are.
        journal_writer: the journal, which one of them writes.
        model: its buffers are averaged; None: there are no buffers to average.
    """

    def __init__(self, rank_group: RankGroup, journal_writer: JournalWriter, model: nn.Module | None) -> None:
        self.rank_group = rank_group
        self._journal_writer = journal_writer
        self._replica_tensors = ReplicaTensors(model)

    def begin(self, optimizer: Optimizer) -> None:
        """The optimizer is known: no step has been made yet."""
        self._replica_tensors.remember(optimizer)
        self._replica_tensors.set_aside()

    def meet(self, optimizer: Optimizer, t: int) -> None:
        """Once torch.distributed is initialised: check that the ranks agree. Collective the first time."""
        if self.rank_group.is_due:  # every step asks
            connect_ranks(self.rank_group, self._journal_writer, t, lambda: self._first_weights(optimizer))

    def _first_weights(self, optimizer: Optimizer) -> Weights:
        self._replica_tensors.first_weights(optimizer, needs_model=False)  # raises for what cannot be trained so
        return _what_trains(optimizer)._replace(buffers=self._replica_tensors.buffers())

    def agree_to_finish(self, optimizer: Optimizer, t: int, steps: int) -> None:
        """Raise unless all ranks finish at this step, and in as many steps. Collective."""
        self.meet(optimizer, t)
        with arriving(f"finish(), at step {t}"):
            weights, shown, unread = _what_trains(optimizer), Shown(signal=float(steps)), (1.0, 0.0, 0.0)
            self.rank_group.agree(Occasion.FINISH, t, weights, shown, expect_equal=False, values=unread)

    # -- buffers --------------------------------------------------------------------------------------------------

    @property
    def _buffers(self) -> Weights:
        """They may differ between ranks until DDP's next forward pass."""
        return NO_WEIGHTS._replace(buffers=self._replica_tensors.buffers())

    def average_buffers(self, t: int, occasion: Occasion) -> None:
        """Average buffers that differ. A rank whose buffers are not finite gets the mean of the others. Collective."""
        group, weights = self.rank_group.group, self._buffers
        if group.replica_index.size == 1 or not weights.buffers:
            return
        with arriving(f"averaging the buffers at step {t}"):
            roll = self.rank_group.agree(occasion, t, weights, Shown(), expect_equal=True)
            if any(roll.finite) and not roll.moving_equal:
                average_(weights.buffers, group, roll.finite)

    @contextmanager
    def consensus(self, optimizer: Optimizer, t: int) -> Iterator[None]:
        """Inside, buffers are averaged; afterwards they are this rank's own again. Collective."""
        weights = self._buffers
        if self.rank_group.replica_index.size == 1 or not weights.buffers:
            yield
            return
        self.meet(optimizer, t)
        with self.rank_group.consensus(), resharded(self._replica_tensors.model), put_back(weights.tensors):
            self.average_buffers(t, Occasion.CONSENSUS)
            yield

    # -- the end of a round ---------------------------------------------------------------------------------------

    def gather(
        self, optimizer: Optimizer, span: tuple[int, int], measure: Measure | None, losses: Losses, length: int
    ) -> Gathered:
        """Read everything off the device at once, and gather it from all ranks. Collective.

        Args:
            optimizer: what it trains must be equal on all ranks.
            span: the steps before and after the round's end.
            measure: of the gradients; None: nothing was sampled.
            losses: those that this rank was given.
            length: how many steps the round had.
        """
        weights, alone = _what_trains(optimizer), self.rank_group.group.replica_index.size == 1
        own = read(
            {
                "finite": [weights.all_finite().float()],
                "sound": [_none_is_nan(self._replica_tensors.buffers(), weights.device).float()],
                "measured": measure.scalars(optimizer) if measure is not None else [],
                "losses": losses.on_device(),
                "bits": [] if alone else fingerprints_of(weights, expect_equal=True),
            }
        )
        losses.take(own["losses"])
        shows = {
            "sound": own["sound"],
            "table": losses.table(length),
            "mean": [losses.mean()],
            "measured": measure.row(own["measured"]) if measure is not None else [],
        }
        with arriving(f"the end of a round, at step {span[1]}"):
            roll = self._roll_call(span, weights, own["finite"], own["bits"])
            rows = gather_named(self.rank_group.group, shows, weights.device)
        tables = [row["table"] for row in rows]
        return Gathered(
            is_sound=all(roll.finite) and all(row["sound"][0] for row in rows),
            losses=[row["mean"][0] for row in rows],
            has_losses=any(number for table in tables for number in table[::2]),
            blocks=merged(tables, length),
            measured=measure.measured([row["measured"] for row in rows]) if measure is not None else Measured(),
            writer=roll.writer,
        )

    def _roll_call(
        self, span: tuple[int, int], weights: Weights, finite: Sequence[float], bits: Sequence[float]
    ) -> Agreement:
        """``bits``: the weights' fingerprints; none if there is only one rank."""
        keeps = self._journal_writer.is_kept
        if not bits and not keeps:
            return Agreement.alone()._replace(finite=[bool(finite[0])])
        values, shown = [*finite, *(bits or (0, 0))], Shown(journal=keeps)
        roll = self.rank_group.agree(Occasion.ROUND_END, span[0], weights, shown, expect_equal=True, values=values)
        if not roll.moving_equal and all(roll.finite):
            raise DisagreementError(
                f"the ranks hold different weights at step {span[1]}, but a search is for one model: wrap it in "
                "DistributedDataParallel, shard it over a mesh of all ranks, or give a number as max_lr, with which "
                "replicas may differ"
            )
        return roll


def _what_trains(optimizer: Optimizer) -> Weights:
    """The parameters; all ranks hold the same."""
    return NO_WEIGHTS._replace(parameters=trained_parameters(optimizer))


def _none_is_nan(buffers: Sequence[Tensor], device: torch.device) -> Tensor:
    found = [~buffer.isnan().any().to(device) for buffer in buffers]
    return torch.stack(found).all() if found else torch.ones((), dtype=torch.bool, device=device)
