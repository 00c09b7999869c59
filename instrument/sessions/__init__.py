"""Sessions: a profile in force in a process, from start to stop; its windows, its reload, and the loop's `Profiler`."""
