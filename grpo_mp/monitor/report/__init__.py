"""Report of one or several runs: charts, tables and answers in one HTML file."""
