"""The kinds and phases of spans: what a rule, `profiled` or `scope` may say that a span is."""

KINDS: tuple[str, ...] = ("request", "step", "op", "layer", "phase", "copy", "loader", "comm", "user")
"""Every kind of span."""

PREPARING: tuple[str, ...] = ("load", "compile")
"""The phases that make a service ready: to load a model, and to compile it."""

PHASES: tuple[str, ...] = ("prepare", "infer_shape", "compute", "post", "forward", "backward", "optimizer", *PREPARING)
"""The parts of a piece of work that a span may be declared to be, under the attribute `phase` of its site."""
