"""A rank whose weights are not those of its data-parallel replicas is named."""

import pytest

from tests.parallel.cases import DRIFTED, Case
from tests.parallel.conftest import Outcomes


def replicas(case: Case, tensor: str) -> list[int]:
    """The ranks that hold the same bits of a tensor as the last one."""
    ranks = list(range(case.ranks))
    if ".experts." not in tensor:
        return ranks
    return ranks[-1 :: -case.sizes.get("expert", 1)][::-1]


@pytest.mark.parametrize("case", DRIFTED, ids=lambda case: case.name)
def test_one_flipped_bit_is_found_wherever_a_replica_is(case: Case, outcomes: Outcomes) -> None:
    """Every rank says the same; two replicas accuse each other, of more the one that differs is named."""
    (said, *others) = outcomes.by_rank(case, "drifted")
    assert all(other == said for other in others)
    assert said.pop("equal") == ""
    assert len(said) > 10
    for what, sentence in said.items():
        where, tensor = what.split(" ")
        holders = replicas(case, tensor)
        if len(holders) == 1:
            assert sentence == ""
            continue
        named = holders if len(holders) == 2 else holders[-1:]
        name = tensor + " of the reference" * (where == "reference")
        start = f"step 7: rank {', '.join(map(str, named))}: weights are not those of the other data-parallel replicas"
        assert sentence.startswith(f"{start}, in {name}: ")
