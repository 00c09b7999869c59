"""What Python and the operating system give a guest: imports, threads, locks, signals, files, limits."""
