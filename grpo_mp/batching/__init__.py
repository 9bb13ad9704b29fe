"""Batching: selects a step's groups, assigns samples to ranks, and packs them into micro-batches."""
