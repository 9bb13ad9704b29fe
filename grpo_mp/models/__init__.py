"""Model families: configs and the parameter mapping."""
