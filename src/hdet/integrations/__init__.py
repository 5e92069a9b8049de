"""Adapters for other libraries, one small file each. None of them is imported by hdet itself."""
