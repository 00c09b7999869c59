"""The recorder: the interface to the hot path in C, probes on functions, their cost, and a limit for it."""
