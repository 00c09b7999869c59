"""The agent of a run: the process that holds the recordings of all others, so that what they recorded outlives them."""
