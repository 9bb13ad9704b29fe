"""Helpers for every package: errors, files, logs, processes, base classes of the settings, shared data types."""
