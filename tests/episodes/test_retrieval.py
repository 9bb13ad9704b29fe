"""Retrieval as a tool: what is found, and that no query or file breaks it."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_mp.rollout import retrieval
from grpo_mp.rollout.protocol import ToolCall
from grpo_mp.rollout.retrieval import SearchIndex
from grpo_mp.rollout.tools import load_tools
from grpo_mp.utils.errors import UserError
from tests.episode_page import read_example

DOCUMENTS = [
    {"title": "Rhine", "text": "The Rhine is a river of 1233 kilometers; it flows through Cologne."},
    {"title": "Elbe", "text": "The Elbe is a river. " + "Water. " * 500},
    {"title": "Cologne", "text": "A city; its cathedral was finished in 1880. NEAR it OR not."},
    {"text": "Nothing of interest: \ud800 'quotes' and \"more\"."},
]


def write(folder: Path, documents: list[dict[str, str]]) -> str:
    file = folder / "docs.jsonl"
    file.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return str(file)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> SearchIndex:
    return SearchIndex(write(tmp_path_factory.mktemp("documents"), DOCUMENTS), most=2, characters=80)


def test_the_best_documents_come_first_and_are_bounded(index: SearchIndex) -> None:
    assert index.search("cathedral", 9).startswith("[1] Cologne\nA city")
    assert [line for line in index.search("rivers in Cologne", 9).splitlines() if line.startswith("[")] == [
        *("[1] Cologne", "[2] Rhine")
    ]
    assert index.search("Elbe", -5) == "[1] Elbe\n" + ("The Elbe is a river. " + "Water. " * 500)[:80]
    assert index.search("volcano") == index.search("") == "No document has any of these words."


@given(st.text() | st.text(alphabet="\"'*:^(){}[]+-\x00\\ ANDORTNE_é日\ud800"))
def test_no_query_is_an_error(index: SearchIndex, query: str) -> None:
    assert index.search(query)


def test_words_of_the_query_language_are_words(index: SearchIndex) -> None:
    for query in ("NEAR", "NOT", 'title: "Cologne', "a OR", "x' OR 1=1 --", "*", "NEAR(a b, 2)", "quot* more" * 500):
        assert "error" not in index.search(query).lower()
    assert "[1] Cologne" in index.search('NOT "cathedral')


def test_the_index_is_read_only_and_follows_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, DOCUMENTS)
    first = SearchIndex(path)
    before = first.file.stat().st_mtime_ns
    assert first.search("Cologne")
    assert SearchIndex(path).file == first.file
    assert first.file.stat().st_mtime_ns == before
    write(tmp_path, [{"text": "a volcano"}])
    assert "a volcano" in SearchIndex(path).search("volcano")
    assert "No document" in first.search("volcano")
    assert sorted(file.suffix for file in tmp_path.iterdir()) == [".fts5", ".fts5", ".jsonl"]


def test_processes_of_two_nodes_with_one_number_make_an_index_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one, here of the very same process, begins and ends while the first one writes."""
    path, read, begun = write(tmp_path, DOCUMENTS), retrieval._read, list[str]()

    def read_twice(documents: str) -> Iterator[tuple[str, str]]:
        first, *others = read(documents)
        yield first
        if not begun:
            begun.append(documents)
            assert "[1] Cologne" in SearchIndex(path).search("cathedral")
        yield from others

    monkeypatch.setattr(retrieval, "_read", read_twice)
    assert SearchIndex(path).search("cathedral").startswith("[1] Cologne\nA city")
    assert sorted(file.suffix for file in tmp_path.iterdir()) == [".fts5", ".jsonl"]


def test_a_bad_document_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"docs\.jsonl, line 2: the column text of a document must be text, not NoneType"
    ):
        SearchIndex(write(tmp_path, [DOCUMENTS[0], {"title": "x"}]))
    assert [file.name for file in tmp_path.iterdir()] == ["docs.jsonl"]
    with pytest.raises(UserError, match="no such file of documents"):
        SearchIndex(str(tmp_path / "none.jsonl"))


def test_the_tool_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = read_example("Retrieval", tmp_path)
    write(tmp_path, DOCUMENTS)
    monkeypatch.chdir(tmp_path)
    kit = load_tools(settings["rollout"]["tools"])
    (schema,) = kit.schemas
    assert (schema["function"]["name"], list(schema["function"]["parameters"]["properties"])) == (
        *("search", ["query", "count"]),
    )
    result = asyncio.run(
        asyncio.run(kit.open(5.0, 1000)).call(ToolCall("search", {"query": "Where is the cathedral?"}))
    )
    assert (result.error, result.text.startswith("[1] Cologne")) == (None, True)
