"""Adapters for other libraries, one small file each. hdet itself imports none of them."""
