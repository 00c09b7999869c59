"""Every shape of function that a rule may name. `tests/test_targets.py` is the table of what becomes of each."""
