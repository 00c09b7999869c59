"""The interfaces of older profilers over the same session, for code that cannot be rewritten yet.

Each module has the names of one profiler, and measures nothing itself. Its docstring has the intended differences.
"""
