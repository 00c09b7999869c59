"""Reports: each view is numbers made of a recording, and a text that shows them.

A view sees finished numbers only, so what was saved yesterday on a server reads on a laptop. See `view` for what a view
is, `summary` for all of them, and `page` for one HTML file of all.

What the numbers mean:

- `total` is host time from begin to end; `self` is total minus the children that ran on the same thread and task, so
  the self times of a tree add up to its total. A task or thread started inside does not shorten its parent's self time.
- A generator is active while its body runs; its total reaches from first to last.
- The device time of a row is that between its own events or, where that is more, the sum of what ran below it.
- A step that is the call of a function, or a scope, begins with the wait for its input right before it.
- Rows are sums and may exceed the clock where work runs side by side. Every ratio says its base.
- p50 and p99 of the tally come from a histogram with at most 0.8 % relative error. Counts, sums, minima and maxima are
  exact.
- A copy that moved nothing (`x.to("cpu")` on the host) is not a copy.
"""
