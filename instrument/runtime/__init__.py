"""The services of Python and of the operating system to a guest: imports, threads, locks, signals, files, limits."""
