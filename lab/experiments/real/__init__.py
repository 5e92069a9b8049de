"""Evidence on real data: twelve workloads over eight data sets (decision 015)."""

import checkout  # noqa: F401 - so that lab is found
