"""Rewards: rule parts, user functions, and the scorer that weighs them."""
