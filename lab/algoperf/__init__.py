"""hdet as an entry of MLCommons AlgoPerf, in its self-tuning ruleset; docs/algoperf.md says how to run it."""
