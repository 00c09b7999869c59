"""Sessions: one profile at work in a process, from start to stop; windows, reload, and the loop's `Profiler`."""
