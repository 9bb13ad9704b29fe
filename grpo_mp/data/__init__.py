"""Prompt sets, the cursor in them, and their overlap with eval sets."""
