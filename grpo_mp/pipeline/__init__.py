"""Pipelines: runs in several stages, such as those of DeepSeek-R1."""
