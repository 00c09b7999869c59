"""The recording, the memory that a process writes and others read: its layout, its readers, and the span model."""
