"""The command `grpo-mp` (main.py) and its subcommands; the slurm_* modules serve the batch scripts in launch/."""
