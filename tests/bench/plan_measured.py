"""What the planner says of one CPU rank beside what is measured: python -m tests.bench.plan_measured

A float32 policy of some 60 million parameters trains for one update. Resident host memory grows by weights, gradients
and Adam's moments when it is built; the most that tensors take while it trains, beyond them, is activations and logits.
Prints both sums in MiB and their ratios; the exit status is 1 where one is off by more than a tenth.
"""

import tempfile
from pathlib import Path
from typing import Any

from grpo_mp import platform

platform.prepare()

import torch
from torch.profiler import ProfilerActivity, profile

from grpo_mp.config import Settings, check_settings
from grpo_mp.models.hf_config import HfConfig
from grpo_mp.models.tiny import make_tiny
from grpo_mp.planner.clusters import read_cluster
from grpo_mp.planner.job import make_job
from grpo_mp.planner.memory import Stretch, plan_memory
from grpo_mp.policy.parallel import start_parallel, stop_parallel
from grpo_mp.policy.policy import Policy
from grpo_mp.trainer.cold_start import one_rank_job
from tests.bench.workload import tokenizer

REACH = 0.1
MIB = 2**20
