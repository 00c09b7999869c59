"""Traces: what reports, converters and files work on, with numpy and without an object for each span.

`trace` has the trace and the views of its rows, `columns` its columns. `intervals` has the algebra of stretches of
time. `self_times` and `call_tree` each define numbers that views show, once.
"""
