"""The recorder: its face, its hot path in Python, what wraps a function, what it costs and its bounds."""
