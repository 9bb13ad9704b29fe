"""Helpers that every package uses: errors, files, logs, processes, settings sections."""
