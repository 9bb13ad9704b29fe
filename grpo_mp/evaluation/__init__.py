"""What samples of held-out problems come to: avg@n, pass@k, maj@k, before and after. Pure, but for its files."""
