"""Prompt sets and their cursor, micro-batch plans, packing."""
