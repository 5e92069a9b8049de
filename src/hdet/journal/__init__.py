"""The journal: what happened, one JSON line per round.

A journal file is a header line, then one line per round, and a line for every resume. Lines are appended, so a run that
dies leaves a readable file. A resume takes back the rounds after its step: readers leave them out.

Numbers that JSON does not know are written as the strings "NaN", "Infinity" and "-Infinity".

An experiment tracker (TensorBoard, W&B, MLflow) can take a round's main numbers, beside the file or in its place.
"""

from hdet.journal.file import SCHEMA, Journal
from hdet.journal.reading import JournalData, read_journal
from hdet.journal.sinks import Journals, Several, Sink, open_journal, scalars

__all__ = [
    "SCHEMA",
    "Journal",
    "JournalData",
    "Journals",
    "Several",
    "Sink",
    "open_journal",
    "read_journal",
    "scalars",
]
