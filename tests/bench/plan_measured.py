"""What the planner says of one CPU rank beside what is measured: python -m tests.bench.plan_measured

A float32 policy of some 60 million parameters trains for one update. Resident host memory grows by weights, gradients
and Adam's moments when it is built; the most that tensors take while it trains, beyond them, is activations and logits.
Prints both sums in MiB and their ratios; the exit status is 1 where one is off by more than a tenth.
"""

from grpo_mp import platform

platform.prepare()


REACH = 0.1
MIB = 2**20
