"""Text packed for a page: deflated, then in letters that mean nothing to HTML. The page's script unpacks it."""

from __future__ import annotations

import base64
import zlib

__all__ = ["packed", "unpacked"]


def packed(text: str) -> str:
    """What ``DecompressionStream("deflate")`` of a browser reads.

    >>> "<" in packed("</script>" * 100), len(packed("</script>" * 100)) < 40, unpacked(packed("</script>"))
    (False, True, '</script>')
    """
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode("ascii")


def unpacked(letters: str) -> str:
    """The text again."""
    return zlib.decompress(base64.b64decode(letters)).decode()
