"""The table of mutations is about today's code."""

import pytest

from tests.bench.mutations import MUTATIONS, ROOT, Mutation


@pytest.mark.parametrize("each", MUTATIONS, ids=lambda each: each.package)
def test_the_line_is_there_once_and_its_mutation_is_python(each: Mutation) -> None:
    text = (ROOT / "grpo_mp" / each.file).read_text()
    assert text.count(each.original) == 1
    compile(text.replace(each.original, each.mutated), each.file, "exec")
    assert (ROOT / "tests" / each.package).is_dir()
