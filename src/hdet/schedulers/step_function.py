"""A schedule that is a plain function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

from hdet.checks import is_real, shown
from hdet.errors import ArgumentError, HdetError
from hdet.optimizer.rates import copy_rate, put_rate


class StepFunction:
    """A scheduler that multiplies an optimizer's own rates by a function of the step.

    Args:
        optimizer: one, or several seen as one.
        function: from a step to a factor. It is called once for each step, and never for one after the last.
        steps: of the run.
    """

    def __init__(self, optimizer: Optimizer, function: Callable[[int], Any], steps: int) -> None:
        self.optimizer, self.function, self.steps, self.last_epoch = optimizer, function, steps, 0
        self._write()

    def step(self) -> None:
        """Go to the next step."""
        self.last_epoch += 1
        self._write()

    def _write(self) -> None:
        factor = factor_of(self.function, min(self.last_epoch, self.steps - 1), range(self.steps))
        for group in self.optimizer.param_groups:
            if "initial_lr" not in group:
                group["initial_lr"] = copy_rate(group["lr"])
            put_rate(group, group["initial_lr"] * factor)

    def state_dict(self) -> dict[str, Any]:
        """The step. The function is not saved, and rates are the optimizer's."""
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self.last_epoch = int(state_dict["last_epoch"])


def number_of(value: Any) -> float | None:
    """A number, also in an array without dimensions; None if it is no number."""
    value = value.item() if getattr(value, "shape", None) == () else value
    try:
        return float(value) if is_real(value) else None
    except OverflowError:
        return math.inf


def factor_of(function: Callable[[int], Any], t: int, steps: range) -> float:
    """What a function of the step says. Raises unless rates can be multiplied by it; ``steps``: all of them."""
    try:
        answer = function(t)
    except HdetError:
        raise
    except Exception as error:
        answer = error
    number = number_of(answer)
    if number is not None and 0 <= number < math.inf:
        return number
    raise ArgumentError(
        f"schedule must give a finite number, not below 0, for each step from 0 to {steps[-1]}, but at step {t} it "
        f"{in_words(answer)}; for instance schedule=lambda t: 1 - t / {steps.stop}"
    ) from (answer if isinstance(answer, Exception) else None)


def in_words(answer: Any) -> str:
    """What a function has answered, for messages; an exception: what it has raised."""
    if isinstance(answer, Exception):
        return f"raised {type(answer).__name__}: {shown(str(answer))}"
    return f"returned {shown(answer)}"
