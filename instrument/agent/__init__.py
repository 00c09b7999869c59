"""The agent of a run: a process that shares the memory of all recordings, so that these outlive their processes."""
