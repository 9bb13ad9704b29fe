"""Say what is wrong with a machine, a model or a run, with evidence and advice."""
