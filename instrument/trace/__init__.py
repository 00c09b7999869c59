"""Stores spans as numpy columns, and computes all that reports, converters and files show of them.

`trace` defines a trace, `columns` its columns, and `intervals` the operations on intervals of time. `self_times` and
`call_tree` define numbers that several views show.
"""
