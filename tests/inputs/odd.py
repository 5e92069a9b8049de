"""Odd values: what people and scripts pass by mistake."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

__all__ = ["ODD"]

ODD: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "False": lambda: False,
    "0": lambda: 0,
    "-1": lambda: -1,
    "1": lambda: 1,
    "3": lambda: 3,
    "0.0": lambda: 0.0,
    "-0.5": lambda: -0.5,
    "0.5": lambda: 0.5,
    "2.5": lambda: 2.5,
    "1e308": lambda: 1e308,
    "10**400": lambda: 10**400,  # no float holds it
    "-10**400": lambda: -(10**400),
    "10**5000": lambda: 10**5000,  # and Python does not print it
    "[10**400]": lambda: [10**400],
    "(0, 10**400)": lambda: (0, 10**400),
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "-inf": lambda: -math.inf,
    '""': lambda: "",
    '"auto"': lambda: "auto",
    '"keep"': lambda: "keep",
    '"0.1"': lambda: "0.1",
    "long text": lambda: "x" * 5000,
    "bytes": lambda: b"run.jsonl",
    "path": lambda: Path("no") / "such" / "file",
    "()": tuple,
    "[]": list,
    "[0.1]": lambda: [0.1],
    "[1, 2, 3]": lambda: [1, 2, 3],
    "[nan]": lambda: [math.nan],
    "(0, 1)": lambda: (0, 1),
    "(1, 0)": lambda: (1, 0),
    "(nan, 1)": lambda: (math.nan, 1),
    '["a"]': lambda: ["a"],
    "[None]": lambda: [None],
    "[[]]": lambda: [[]],
    "{}": dict,
    '{"a": 1}': lambda: {"a": 1},
    "set": lambda: {1, 2},
    "range": lambda: range(3),
    "generator": lambda: (i for i in range(2)),
    "object": object,
    "function": lambda: abs,
    "lambda": lambda: lambda: None,
    "class": lambda: int,
    "module": lambda: math,
    "error": lambda: ValueError("no"),
    "numpy float": lambda: numpy.float32(0.5),
    "numpy int": lambda: numpy.int64(3),
    "numpy bool": lambda: numpy.bool_(True),
    "numpy array without dimensions": lambda: numpy.array(0.1),
    "scalar tensor": lambda: torch.tensor(0.1),
    "integer tensor": lambda: torch.tensor(3),
    "truth tensor": lambda: torch.tensor(True),
    "complex tensor": lambda: torch.tensor(1j),
    "[scalar tensor]": lambda: [torch.tensor(0.1)],
    "nan tensor": lambda: torch.tensor(math.nan),
    "layer": lambda: nn.Linear(2, 1),
    "layer class": lambda: nn.Linear,
    "empty model": nn.Module,
    "dtype": lambda: torch.float32,
    "device": lambda: torch.device("cpu"),
    "optimizer": lambda: torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1),
    "scheduler": lambda: torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)),
}
