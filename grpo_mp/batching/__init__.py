"""Samples into micro-batches: which groups are taken, which rank trains on which sample, how they are packed."""
