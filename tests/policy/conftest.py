"""Megatron is loaded through the platform in every test of this folder."""

from grpo_mp.platform import prepare

prepare()
