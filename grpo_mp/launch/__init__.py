"""Start ranks: on one machine (`python -m grpo_mp.launch`), and as Slurm tasks, for the scripts of launch/."""
