"""lab/experiments/behaviour.py: the fingerprint changes with what the rule decides, and with nothing else."""

from __future__ import annotations

import behaviour
import pytest
from behaviour import FAULTS, decisions, fingerprint
from provenance import library
from real_table import RESULTS, of_another_rule, read

from hdet.rule.constants import DEFAULT, LIMITS

UNSEEN = {"assumed_length", "leap", "as_bad"}
"""The first is for runs of unknown length, the second for guards alone; of a share of a rise only much is seen."""


@pytest.mark.parametrize("name", [name for name in DEFAULT._fields if name not in UNSEEN])
def test_every_constant_of_the_search_changes_it(name: str) -> None:
    value = getattr(DEFAULT, name)
    changed = DEFAULT._replace(**{name: value + 1 if isinstance(value, int) else 1.25 * value})
    assert fingerprint(changed) != fingerprint()


@pytest.mark.parametrize("name", [name for name in LIMITS._fields if name not in UNSEEN])
def test_every_limit_of_the_judge_changes_it(name: str) -> None:
    assert fingerprint(limits=LIMITS._replace(**{name: 1.25 * getattr(LIMITS, name)})) != fingerprint()


def test_words_and_names_do_not_change_it() -> None:
    """It is made of steps, rates and rollbacks; the last bits of a rate do not count."""
    assert library() == fingerprint() == fingerprint(DEFAULT._replace(prior_weight=DEFAULT.prior_weight + 1e-15))
    run = behaviour.recorded()[0]
    for line in decisions(run, "none", DEFAULT, LIMITS):
        step, rate, rollbacks = line.split()
        assert 0 < int(step) <= run["steps"]
        assert float(rate) > 0
        assert rollbacks == "0"


def test_every_fault_changes_some_run() -> None:
    runs = behaviour.recorded()
    plain = [[*decisions(run, "none", DEFAULT, LIMITS)] for run in runs]
    for fault in FAULTS[1:]:
        assert plain != [[*decisions(run, fault, DEFAULT, LIMITS)] for run in runs], fault


def test_the_tables_say_which_rows_are_of_another_rule() -> None:
    tables = read(RESULTS, "test")
    assert of_another_rule(tables) == ""
    label = tables[0].labels["auto-alone"]
    tables[0] = tables[0]._replace(rules={**tables[0].rules, "auto-alone": "another"})
    assert of_another_rule(tables) == f"Measured with another rule than that of now: {label}."
