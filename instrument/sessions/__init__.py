"""The sessions. A session keeps one profile in force in a process, from `start` to `stop`."""
