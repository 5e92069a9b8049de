"""The memory of a probed run: which moments are worth going back to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hdet.algorithm.auto.memory import Memory


def test_it_keeps_a_few_moments_spread_over_the_levels() -> None:
    memory = Memory()
    assert memory.last_below(0.0) is None
    for step in range(20):
        memory = memory.added(float(step), step)
    assert len(memory.moments) == 4
    found = [memory.last_below(level) for level in (-5.0, 12.0, 19.0)]
    steps = [moment.step for moment in found if moment is not None]
    assert steps[0] == 0
    assert steps == sorted(set(steps))
    assert steps[-1] == 19


def test_it_goes_back_to_what_has_proved_itself_and_then_further() -> None:
    memory = Memory()
    assert memory.proven is None
    for step in range(6):
        memory = memory.ends().added(0.0, step)
    steps = []
    for _ in range(3):
        proven = memory.proven
        assert proven is not None
        steps.append(proven.step)
        memory = memory.used(proven)
    assert steps == [4, 0, 0]


def test_what_has_no_copy_is_forgotten() -> None:
    memory = Memory().added(0.0, 1).added(1.0, 2).added(2.0, 3)
    assert [moment.step for moment in memory.within({0, 2}).moments] == [1, 3]
    assert memory.within(()).last_below(9.0) is None


@given(st.lists(st.tuples(st.floats(-40, 40), st.booleans()), max_size=40))
def test_no_two_moments_share_a_slot_and_a_new_one_never_takes_a_slot_that_is_kept(
    moments: list[tuple[float, bool]],
) -> None:
    memory = Memory()
    for step, (level, ends) in enumerate(moments):
        before = memory.ends() if ends else memory
        memory = before.added(level, step)
        assert len(memory.slots) == len(memory.moments) <= 4
        new = memory.moments[-1]
        kept = {moment.slot: moment.step for moment in before.moments}
        assert all(kept[moment.slot] == moment.step for moment in memory.moments[:-1])
        assert (new.level, new.step) == (level, step)
        assert new.slot in range(4)
