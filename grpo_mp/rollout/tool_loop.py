"""Rollout function of `rollout.tools`: generates turns and calls their tools until a turn calls no tool."""

from collections import Counter

from grpo_mp.rollout.protocol import Episode, EpisodeLimitError, Policy, Task
from grpo_mp.utils.types import Message


async def call_tools(task: Task, policy: Policy) -> Episode:
    """Roll out one task with its tools. Metrics: counts of `tool_calls`, `tool_raised` and `tool_timeout`."""
    messages: list[Message] = list(task.messages)
    counts = Counter(tool_calls=0, tool_raised=0, tool_timeout=0)
    while True:
        try:
            turn = await policy.generate(messages)
        except EpisodeLimitError:
            return policy.episode(metrics=counts, state="truncated")
        if not turn.tool_calls:
            return policy.episode(metrics=counts)
        messages.append(turn.message)
        for call in turn.tool_calls:
            result = await task.tools.call(call)
            counts["tool_calls"] += 1
            if result.error:
                counts[f"tool_{result.error}"] += 1
            answer = {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result.text}
            messages.append(answer)
