"""The recording, the memory that a process writes and other processes read: its layout, its readers, and its spans."""
