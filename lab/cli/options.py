"""The options of the commands, each with its help: a signature then reads as a list of names and defaults."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from hdet.cli.output import Force, Json

__all__ = [
    "AutoLr",
    "BatchSize",
    "Data",
    "Device",
    "EvalEvery",
    "Force",
    "Guess",
    "Json",
    "Lr",
    "Method",
    "OptimizerName",
    "OptimizerOption",
    "OutFolder",
    "Replicas",
    "Resume",
    "Seed",
    "Spread",
    "Steps",
    "SyncEvery",
    "Task",
    "TaskName",
    "Where",
    "Which",
]


class TaskName(str, Enum):
    """The bundled tasks."""

    feed = "feed"
    text = "text"
    digits = "digits"


class Method(str, Enum):
    """What is done about the rate."""

    search = "search"
    replicas = "replicas"
    none = "none"


class OptimizerName(str, Enum):
    """What makes the steps."""

    adam = "adam"
    sgd = "sgd"


class Device(str, Enum):
    """Where tensors live."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


_SIZE, _METHOD = "The run", "The method"

Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in --out; its options are remembered.")]
OutFolder = Annotated[Path, typer.Option("--out", help="Folder of the run.", show_default=False)]

Task = Annotated[
    TaskName,
    typer.Option(help="A recommender's stream, Python's own source, or handwritten digits.", rich_help_panel=_SIZE),
]
Steps = Annotated[int, typer.Option(help="Steps, and length of the schedule.", rich_help_panel=_SIZE)]
Replicas = Annotated[
    int, typer.Option(help="Ranks that train together; under torchrun those that it started.", rich_help_panel=_SIZE)
]
BatchSize = Annotated[
    int | None,
    typer.Option(help="Samples per replica and step.", show_default="the task's", rich_help_panel=_SIZE),
]
EvalEvery = Annotated[
    int | None,
    typer.Option(help="Steps between evaluations.", show_default="a tenth of the steps", rich_help_panel=_SIZE),
]
Seed = Annotated[int, typer.Option(help="Of weights, batches and multipliers.", rich_help_panel=_SIZE)]
Where = Annotated[
    Device, typer.Option("--device", help="auto: a GPU per replica if they suffice.", rich_help_panel=_SIZE)
]
Data = Annotated[
    Path | None,
    typer.Option(help="For text a text file, for digits an .npz of images and labels.", rich_help_panel=_SIZE),
]

Lr = Annotated[
    str | None,
    typer.Option(
        help="Peak learning rate, or auto: found while training.",
        metavar="NUMBER|auto",
        show_default="auto; with --method replicas or none a rate that suits the task",
        rich_help_panel=_METHOD,
    ),
]
Guess = Annotated[float, typer.Option(help="Where --lr auto begins; may be far off.", rich_help_panel=_METHOD)]
Which = Annotated[
    Method | None,
    typer.Option(
        "--method",
        help="search: the rate is found while one model trains; replicas: each at a rate of its own, averaged in "
        "rounds, as published; none: torch's OneCycleLR, to compare with.",
        show_default="search with --lr auto, none with a number",
        rich_help_panel=_METHOD,
    ),
]
AutoLr = Annotated[bool, typer.Option(help="Whether losses move the rate (replicas).", rich_help_panel=_METHOD)]
Spread = Annotated[
    float,
    typer.Option(
        help="Distance of the outermost replicas from the base rate (replicas).",
        show_default="1/9",
        rich_help_panel=_METHOD,
    ),
]
SyncEvery = Annotated[
    int | None,
    typer.Option(help="Steps per round (replicas).", show_default="a fiftieth of the steps", rich_help_panel=_METHOD),
]
OptimizerOption = Annotated[
    OptimizerName, typer.Option("--optimizer", help="Adam, or SGD with momentum.", rich_help_panel=_METHOD)
]
