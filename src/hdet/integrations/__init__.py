"""Adapters for other libraries, one small file each. None of them imports the other library."""
