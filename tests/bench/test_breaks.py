"""The table of breaks is about today's code."""

import pytest

from tests.bench.breaks import BREAKS, ROOT, Break


@pytest.mark.parametrize("each", BREAKS, ids=lambda each: each.package)
def test_the_line_is_there_once_and_its_break_is_python(each: Break) -> None:
    text = (ROOT / "grpo_mp" / each.file).read_text()
    assert text.count(each.right) == 1
    compile(text.replace(each.right, each.wrong), each.file, "exec")
    assert (ROOT / "tests" / each.package).is_dir()
