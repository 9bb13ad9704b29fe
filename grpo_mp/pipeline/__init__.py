"""Runs of several stages, such as R1's, one after another."""
