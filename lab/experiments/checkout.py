"""Makes the package ``lab`` known to scripts that are run by their path: the checkout's root goes on Python's path."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))
