"""A page of one or several runs: records read from run folders, what is shown of them, one HTML file."""
