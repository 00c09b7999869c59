"""Reports: each view is numbers made of a recording, and a text that shows them.

A view uses finished numbers only, so a report on a laptop can be of yesterday's server. See `view` for the definition
of a view, `summary` for all of them, and `page` for one HTML file of all.

The meaning of the numbers:

- `total` is host time from begin to end. `self` is total minus the children on the same thread and task, so the self
  times of a tree add up to its total. A task or thread started inside does not shorten its parent's self time.
- A generator is active while its body runs. Its total is from the first resumption to the last.
- The device time of a row is that between its own events or, if larger, the sum of the rows below it.
- A step that is the call of a function, or a scope, begins with the wait for its input right before it.
- Rows are sums and may exceed the clock if work runs in parallel. Every ratio names its base.
- p50 and p99 of the tally come from a histogram with at most 0.8 % relative error. Counts, sums, minima and maxima are
  exact.
- A copy that moved nothing (`x.to("cpu")` on the host) is not a copy.
"""
