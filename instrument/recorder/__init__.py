"""The recorder: its face over the hot path in C, wrapped functions, what they cost and their bounds."""
