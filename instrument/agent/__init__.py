"""The agent of a run: a process that maps the memory of all recordings, so that these outlive their processes."""
