"""Planner: estimates the memory and step time of a run before it starts, without a GPU."""
