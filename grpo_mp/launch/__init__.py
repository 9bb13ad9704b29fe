"""Start ranks: on one machine (local.py), and as Slurm tasks, for the batch scripts of the folder launch/."""
