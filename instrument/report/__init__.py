"""Reports: each view computes numbers from a recording and shows them as text.

A view needs only the recording, so a laptop can report on yesterday's server. `view` defines a view, `summary` combines
views, and `page` writes all of them to one HTML file.

The meaning of the numbers:

- `total` is host time from begin to end. `self` is total minus the children on the same thread and task, so the self
  times of a tree add up to its total. A task or thread started inside does not shorten its parent's self time.
- A generator is active while its body runs. Its total is from the first resumption to the last.
- The device time of a row is the time between its own events. If the rows below it have a larger sum, it is that sum.
- A step from a function call or a scope includes the wait for its input right before it.
- Rows are sums and may exceed the clock if work runs in parallel. Every ratio names its base.
- p50 and p99 of the tally come from a histogram with at most 0.8 % relative error. Counts, sums, minima and maxima are
  exact.
- A copy that moved nothing (`x.to("cpu")` on the host) is not a copy.
"""
