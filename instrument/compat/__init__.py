"""Substitutes for older profilers, for code that cannot be rewritten yet. They record with a session of `instrument`.

Each module has the functions of one profiler under their original names. Its docstring lists the intended differences.
"""
