"""Ranks: coordinates, layout rules, process groups, rendezvous and exit marks."""
