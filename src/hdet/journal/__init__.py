"""The journal: what happened in a run, one line of JSON per round.

A journal file is a header line, then one line per round, and a line for every resume. Lines are appended, so the file
of a run that dies is readable. A resume undoes the rounds after its step, and readers leave them out.

Numbers that JSON does not know are written as the strings "NaN", "Infinity" and "-Infinity".

An experiment tracker (TensorBoard, W&B, MLflow) can take a round's main numbers, beside the file or instead of it.
"""

from hdet.journal.file import SCHEMA, Journal
from hdet.journal.reading import JournalData, read_journal
from hdet.journal.sinks import Journals, Sink, open_journal, scalars

__all__ = ["SCHEMA", "Journal", "JournalData", "Journals", "Sink", "open_journal", "read_journal", "scalars"]
