"""Rollouts of more than one answer: what a user's rollout function gets and returns, chat templates, tools."""
