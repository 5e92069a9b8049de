"""Replicas that come and go: with a stand-in for torchft on threads, and with torchft itself."""
