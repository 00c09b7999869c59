"""Traces: spans as numpy columns, without an object for each. Reports, converters and files use them.

`trace` defines the trace and span objects, `columns` its columns, and `intervals` operations on intervals of time.
`self_times` and `call_tree` define numbers that several views show.
"""
