"""Adapters for other libraries, one small file each. hdet itself imports :mod:`hdet.integrations.rules` alone."""
