"""The kinds of spans: what a rule, `profiled` or `scope` may say that a span is."""

KINDS: tuple[str, ...] = ("request", "step", "op", "layer", "phase", "copy", "loader", "comm", "user")
"""Every kind of span."""
