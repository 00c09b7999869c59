"""Adapters to Python and the operating system, such as import hooks, threads and signals."""
