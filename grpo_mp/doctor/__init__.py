"""Diagnose a machine or a model: findings with evidence and advice."""
