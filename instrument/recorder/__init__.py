"""The recorder: an interface to the hot path in C, probes on functions, their cost, and a bound for it."""
