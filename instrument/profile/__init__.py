"""The profile: what its keys are and mean (`model`, `keys`, `kinds`), and how a file of them is read."""
