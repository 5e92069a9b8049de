"""The same fixtures and profiles as for the library's tests."""

from tests.conftest import no_leaks

__all__ = ["no_leaks"]
