"""Reports: views that compute numbers from a recording and print them as text.

A view needs only the recording, so a report on a server's recording can be made on any other machine. `view` defines
the options and the recording of a view, `summary` prints several views, and `page` writes them to one HTML file.

The numbers have these meanings:

- `total` is the host time from the start to the end of a span. `self` is the total minus the time of the spans below it
  on the same thread and task, so self times add up to the total of the tree. Work on other threads does not shorten
  self time.
- A generator is active while its body runs. Its total is the time from its first to its last resumption.
- The device time of a row is the time between its own CUDA events, but at least the sum of the rows below it.
- The time of a step that a function call or a scope records includes the wait for input right before the step.
- Rows are sums and may exceed the elapsed time if work runs in parallel. The base of every ratio is printed.
- p50 and p99 of the tally come from a histogram with at most 0.8 % relative error. Counts, sums, minima and maxima are
  exact.
- A copy that moved nothing (`x.to("cpu")` on the host) is not counted as a copy.
"""
