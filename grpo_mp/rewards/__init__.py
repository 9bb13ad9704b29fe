"""Rewards: built-in terms, user functions, and the scorer that adds them up by weight."""
