"""Scores of held-out problems: avg@n, pass@k and maj@k, their files and their plot."""
