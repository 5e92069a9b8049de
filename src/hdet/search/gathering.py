"""What the ranks of a search do together: they check that they agree, average buffers, and gather what each has seen.

After each of these all ranks know the same, so that all make the same decision. A search on one rank only calls
:meth:`Ranks.begin` at the start and :meth:`Ranks.gather` at a round's end, which reads what it has seen off its device.

:mod:`hdet.ranks` serves replica ensembles too, so to its code each rank is a *replica*, although the ranks of a search
hold one model. What it needs here: an :class:`Occasion` is the call of the user's in which ranks communicate, and
:class:`RankReport` is what a rank reports to the others then (its *signal* is a number that is compared). A
*fingerprint* is a number made of the bits of tensors; in an :class:`Agreement`, ``moving_equal`` says by these whether
the trained weights or buffers that were shown are bitwise equal on all ranks. :func:`arriving` adds to the error of a
failed collective which ranks are missing; buffers that are *set aside* are expected to be equal. In *consensus* all
ranks hold the mean of their buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.copies import put_back
from hdet.errors import DisagreementError
from hdet.journal.writer import JournalWriter, connect_ranks
from hdet.optimizer import trained_parameters
from hdet.ranks.agreement import Agreement, Occasion, RankGroup, RankReport, fingerprints_of
from hdet.ranks.average import average_
from hdet.ranks.group import arriving, gather_named
from hdet.ranks.shards import resharded
from hdet.ranks.weights import NO_WEIGHTS, ReplicaTensors, Weights, read
from hdet.rollback.losses import Losses
from hdet.rule.decision import Evidence
from hdet.rule.estimate import Measured
from hdet.rule.judge import merged, table_of
from hdet.search.steps import Sampling, Steps


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

    @property
    def buffers(self) -> list[Tensor]:
        """The model's float buffers. They may differ between ranks until DDP's next forward pass."""
        return self._replica_tensors.buffers()

    def begin(self, optimizer: Optimizer) -> None:
        """The optimizer is known: no step has been made yet."""
        self._replica_tensors.remember(optimizer)
        self._replica_tensors.set_aside()

    def gather(
        self, optimizer: Optimizer, end: int, steps: Steps, losses: Losses, *, is_alone: bool
    ) -> tuple[Evidence, bool]:
        """Read everything off the device at once, and gather it from all ranks. Collective.

        ``end``: the step of the schedule that comes next.

        Returns:
            what all ranks have seen, and whether this rank writes the journal, if it has one.
        """
        measure = None if steps.sampling is Sampling.NONE else steps.measure
        if not is_alone:
            self._average_buffers(end - 1, Occasion.BUFFERS)  # before snapshots are made: all ranks' are equal
        weights, count = _what_trains(optimizer), steps.in_round
        own = read(
            {
                "finite": [weights.all_finite().float()],
                "nan": [buffer.isnan().any().float() for buffer in self.buffers],
                "measured": measure.scalars(optimizer) if measure is not None else [],
                "losses": losses.on_device(),
                "fingerprints": [] if is_alone else fingerprints_of(weights, expect_equal=True),
            }
        )
        row: dict[str, list[float]] = {
            "sound": [not any(own["nan"])],
            "table": table_of(losses.read(own["losses"]), count),
            "measured": measure.row(own["measured"]) if measure is not None else [],
        }
        rows, is_finite, writes = [row], bool(own["finite"][0]), True
        if not is_alone:
            rows, agreed = self._exchange(end, weights, row, [*own["finite"], *own["fingerprints"]])
            is_finite, writes = all(agreed.finite), agreed.writer == self.rank_group.group.rank
        blocks = merged([one["table"] for one in rows], count)
        evidence = Evidence(
            end=end,
            steps=count,
            made=steps.made,
            blocks=blocks,
            measured=measure.measured([one["measured"] for one in rows]) if measure is not None else Measured(),
            is_finite=is_finite and all(one["sound"][0] for one in rows),
            losses=tuple([one["table"][-1] for one in rows]) if blocks else (),
        )
        return evidence, writes

    def connect(self, optimizer: Optimizer, t: int) -> None:
        """Once torch.distributed is initialised: check that the ranks agree. Collective the first time."""
        if self.rank_group.is_due:
            connect_ranks(self.rank_group, self._journal_writer, t, lambda: self._first_weights(optimizer))

    def _first_weights(self, optimizer: Optimizer) -> Weights:
        self._replica_tensors.first_weights(optimizer, needs_model=False)  # raises for what cannot be trained so
        return _what_trains(optimizer)._replace(buffers=self.buffers)

    def agree_to_finish(self, optimizer: Optimizer, t: int, steps: int) -> None:
        """Raise unless all ranks finish at this step, and in as many steps. Collective."""
        self.connect(optimizer, t)
        with arriving(f"finish(), at step {t}"):
            weights, shown, unread = _what_trains(optimizer), RankReport(signal=float(steps)), (1.0, 0.0, 0.0)
            self.rank_group.agree(Occasion.FINISH, t, weights, shown, expect_equal=False, values=unread)

    def converge(self, optimizer: Optimizer, t: int) -> None:
        """Average the buffers now, and nothing else: weights are equal already. Collective."""
        self.connect(optimizer, t)
        self._average_buffers(t, Occasion.CONVERGE)

    def _average_buffers(self, t: int, occasion: Occasion) -> None:
        """Average buffers that differ. A rank whose buffers are not finite gets the mean of the others. Collective."""
        group, weights = self.rank_group.group, NO_WEIGHTS._replace(buffers=self.buffers)
        if group.replica_index.size == 1 or not weights.buffers:
            return
        with arriving(f"averaging the buffers at step {t}"):
            agreed = self.rank_group.agree(occasion, t, weights, RankReport(), expect_equal=True)
            if any(agreed.finite) and not agreed.moving_equal:
                average_(weights.buffers, group, agreed.finite)

    @contextmanager
    def consensus(self, optimizer: Optimizer, t: int) -> Iterator[None]:
        """Inside, buffers are averaged; afterwards they are this rank's own again. Collective."""
        buffers = self.buffers
        if self.rank_group.replica_index.size == 1 or not buffers:
            yield
            return
        self.connect(optimizer, t)
        with self.rank_group.consensus(), resharded(self._replica_tensors.model), put_back(buffers):
            self._average_buffers(t, Occasion.CONSENSUS)
            yield

    def _exchange(
        self, end: int, weights: Weights, row: Mapping[str, Sequence[float]], known: Sequence[float]
    ) -> tuple[list[dict[str, list[float]]], Agreement]:
        """The rows of all ranks at the end of a round, and their agreement. Raises if weights differ. Collective.

        ``known``: whether the weights are finite, and their fingerprints.
        """
        shown = RankReport(keeps_journal=self._journal_writer.is_kept)
        agreed = self.rank_group.agree(Occasion.ROUND_END, end - 1, weights, shown, expect_equal=True, values=known)
        if not agreed.moving_equal and all(agreed.finite):
            raise DisagreementError(
                f"the ranks hold different weights at step {end}, but a search is for one model: wrap it in "
                "DistributedDataParallel, shard it over a mesh of all ranks, or use hdet.OneCycleLR, under which "
                "replicas may differ"
            )
        return gather_named(self.rank_group.group, row, weights.device), agreed


def _what_trains(optimizer: Optimizer) -> Weights:
    """The parameters; all ranks hold the same."""
    return NO_WEIGHTS._replace(parameters=trained_parameters(optimizer))
