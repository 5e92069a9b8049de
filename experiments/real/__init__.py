"""Evidence on real data: twelve workloads over eight data sets (decision 015)."""
