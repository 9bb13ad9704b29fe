"""Ranks: their coordinates, the rules of layouts, process groups, and how ranks meet and end."""
