"""Adapters to Python and the operating system that leave the service unaffected: imports, threads, signals, files,
limits."""
