"""Report of a run: charts, tables and answers in one HTML file."""
