"""The sessions: a session keeps one profile in force in a process, from `start` to `stop`, and ends in order."""
