"""Starting ranks: on one machine (`python -m grpo_mp.launch`), and as tasks of Slurm, for the scripts of launch/."""
