"""Numbers from a real store, taken by several workers at once."""

from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from grpo_mp.rollout.worker import WorkQueue


def drain(queue: WorkQueue) -> list[int]:
    taken = []
    while (number := queue.next()) is not None:
        taken.append(number)
    return taken


def test_numbers_come_in_order_and_then_none() -> None:
    queue = WorkQueue(dist.HashStore(), "step 1", 3)
    assert [queue.next() for _ in range(6)] == [0, 1, 2, None, None, None]
    assert WorkQueue(dist.HashStore(), "step 1", 0).next() is None


def test_each_number_goes_to_exactly_one_of_many_workers() -> None:
    store, workers, size = dist.HashStore(), 8, 500
    with ThreadPoolExecutor(workers) as pool:
        taken = list(pool.map(drain, [WorkQueue(store, "step 1", size) for _ in range(workers)]))
    assert sorted(number for numbers in taken for number in numbers) == list(range(size))
    assert all(numbers == sorted(numbers) for numbers in taken)


def test_queues_with_different_names_are_independent() -> None:
    store = dist.HashStore()
    first, second = WorkQueue(store, "step 1", 2), WorkQueue(store, "eval at step 1", 2)
    assert (first.next(), second.next(), first.next(), first.next(), second.next()) == (0, 0, 1, None, 1)
