"""What is built on hdet and is no part of it: tasks, training runs, the demonstration, experiments, benchmarks.

It is not installed: it runs in a checkout, from its root.
"""
