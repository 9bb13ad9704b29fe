"""Prepare the platform before any test of this folder imports Megatron."""

from grpo_mp.platform import prepare

prepare()
