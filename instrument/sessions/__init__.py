"""The sessions. A session records with one profile in a process, from `start` to `stop`."""
