"""Every test of this folder imports Megatron through the platform."""

from grpo_mp.platform import prepare

prepare()
