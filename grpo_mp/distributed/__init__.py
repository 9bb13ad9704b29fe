"""Ranks: coordinates, layout rules, process groups, rendezvous, ports."""
