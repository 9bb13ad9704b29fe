"""A GPU that somebody else uses. The rule is pure; a CPU has no device to be taken."""

import pytest

from grpo_mp import platform
from grpo_mp.errors import UserError
from grpo_mp.platform.device_check import check_device, check_free

GIB = 2**30


def test_a_device_in_use_is_refused_with_how_much() -> None:
    with pytest.raises(
        UserError, match=r"^GPU 3: 70\.0 of 140\.0 GiB are in use by another process: end it, or choose"
    ):
        check_free(3, 70 * GIB, 140 * GIB)


def test_what_a_context_or_a_screen_takes_is_no_obstacle() -> None:
    check_free(0, 139 * GIB, 140 * GIB)
    check_free(0, 7 * GIB, 8 * GIB)


@pytest.mark.skipif(platform.on_cuda(), reason="there is a GPU")
def test_on_a_cpu_nothing_is_taken() -> None:
    check_device(7)
