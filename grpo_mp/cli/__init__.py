"""The command `grpo-mp`: main.py finds the sub-command, the other modules are sub-commands."""
