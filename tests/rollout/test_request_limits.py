import asyncio
from collections.abc import Awaitable

import pytest

from grpo_mp.rollout.request_limits import RequestLimits
from tests.virtual_time import run_virtually


async def ends(limits: RequestLimits, limit_s: float, body: Awaitable[object]) -> bool:
    try:
        async with limits.limit(limit_s):
            await body
    except TimeoutError:
        return False
    return True


def test_a_limit_runs() -> None:
    limits = RequestLimits()
    assert run_virtually(ends(limits, 10.0, asyncio.sleep(9.9)))
    assert not run_virtually(ends(limits, 9.8, asyncio.sleep(9.9)))


def test_limits_stand_still_while_requests_are_paused() -> None:
    """One that has begun, one that begins meanwhile; both run on after it."""

    async def run() -> None:
        limits = RequestLimits()
        begun = asyncio.create_task(ends(limits, 0.1, asyncio.sleep(10.0)))
        await asyncio.sleep(0)
        for _ in range(2):
            limits.pause()
            meanwhile = asyncio.create_task(ends(limits, 0.1, asyncio.sleep(10.0)))
            await asyncio.sleep(0.3)
            assert not begun.done()
            assert not meanwhile.done()
            limits.resume()
            await asyncio.sleep(0)
        assert not await begun
        assert not await meanwhile

    run_virtually(run())


def test_a_limit_that_has_expired_does_not_disturb_a_pause() -> None:
    async def run() -> None:
        limits = RequestLimits()
        late = asyncio.create_task(ends(limits, 0.0, asyncio.sleep(10.0)))
        await asyncio.sleep(0)
        limits.pause()
        limits.resume()
        assert not await late

    run_virtually(run())


def test_the_body_may_raise_what_it_wants() -> None:
    async def run() -> None:
        limits = RequestLimits()
        with pytest.raises(KeyError):
            async with limits.limit(1.0):
                raise KeyError
        limits.pause()
        limits.resume()

    run_virtually(run())
