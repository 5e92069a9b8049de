"""Joins the method and the communication: losses, weights, rounds, and the faces that users hold."""
