"""Retrieval over documents in an SQLite FTS5 index beside their file: `search = SearchIndex("docs.jsonl").search`."""

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from grpo_mp.data.rows import read_rows
from grpo_mp.utils.errors import UserError
from grpo_mp.utils.files import encodable, incomplete

MOST_WORDS = 64  # of a query
SETUP = "CREATE VIRTUAL TABLE documents USING fts5(title, text, tokenize='porter unicode61')"
QUERY = "SELECT title, text FROM documents WHERE documents MATCH ? ORDER BY bm25(documents, 2.0, 1.0) LIMIT ?"


class SearchIndex:
    """Documents of a file with a column `text` and, if it has one, `title`: JSONL, or Parquet."""

    def __init__(self, documents: str, most: int = 5, characters: int = 600) -> None:
        """Open the index of a file; make it where it is missing or older than the file.

        A result has at most `most` documents, of each at most `characters`. Raises UserError for a bad file or row.
        """
        self.most, self.characters = most, characters
        source = Path(documents)
        if not source.is_file():
            raise UserError(f"{documents}: no such file of documents to search in")
        # A file of its own for each state of the documents: ranks that still read an older one are not disturbed.
        state = source.stat()
        self.file = source.with_name(f"{source.name}.{state.st_size}.{state.st_mtime_ns}.fts5")
        if not self.file.exists():
            _build(documents, self.file)

    def search(self, query: str, count: int = 3) -> str:
        """
        Search documents for words; the best come first.

        Args:
            query: the words to search for
            count: how many documents to return
        """
        # Quoted words are no syntax of FTS5, whatever the query is.
        words = [f'"{word}"' for word in re.findall(r"\w+", query)[:MOST_WORDS]]
        rows = self._select(" OR ".join(words), max(1, min(count, self.most))) if words else []
        found = [f"[{number}] {title}\n{text[: self.characters]}" for number, (title, text) in enumerate(rows, start=1)]
        return "\n\n".join(found) or "No document has any of these words."

    def _select(self, words: str, count: int) -> list[tuple[str, str]]:
        # One connection a call: calls come from threads.
        with closing(sqlite3.connect(f"{self.file.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            return connection.execute(QUERY, (words, count)).fetchall()


def _build(documents: str, file: Path) -> None:
    """Write an index, complete or not at all: several ranks may at a time."""
    with incomplete(file) as temporary, closing(sqlite3.connect(temporary)) as connection, connection:
        connection.execute("PRAGMA journal_mode = OFF")
        connection.execute(SETUP)
        connection.executemany("INSERT INTO documents VALUES (?, ?)", _read(documents))


def _read(documents: str) -> Iterator[tuple[str, str]]:
    for row in read_rows(documents):
        title, text = _column(row.columns, "title", row.location, ""), _column(row.columns, "text", row.location)
        yield title, text


def _column(columns: dict[str, Any], name: str, location: str, default: Any = None) -> str:
    value = columns.get(name, default)
    if not isinstance(value, str):
        raise UserError(f"{location}: the column {name} of a document must be text, not {type(value).__name__}")
    return encodable(value)
