"""Stores spans as numpy columns, and computes the numbers that reports, converters and files show.

`trace` and `columns` define a trace, and `intervals` computes with intervals of time. `self_times` and `call_tree`
compute numbers that several views show.
"""
