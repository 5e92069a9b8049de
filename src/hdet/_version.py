"""The version, in one place: the build and the journal read it here."""

__version__ = "0.1.0"
