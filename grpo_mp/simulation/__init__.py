"""Plays a run's generation and training event by event, for the schedules in which they may share or divide GPUs."""
