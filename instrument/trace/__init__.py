"""A trace as columns: what reports, converters and files work on, with numpy and without an object for each span.

`columns` is the trace, `of_spans` makes one of span objects and the way back, `intervals` has the algebra of stretches
of time, and `self_times`, `call_tree` and `counting` each define numbers that views show, once.
"""
