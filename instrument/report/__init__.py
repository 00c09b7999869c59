"""Reports: each view is numbers made of a recording, and a text that shows them.

A view sees finished numbers only, so what was saved yesterday on a server reads on a laptop. See `view` for what a view
is, and `summary` for all of them.
"""
