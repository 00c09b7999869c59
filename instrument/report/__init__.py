"""Reports: views that compute numbers from a recording and print them as text.

A view needs only the recording, so a report can be made on any machine. The module `view` defines the options that a
view takes and the recording that it reads. `section` defines the tables of a view, and `html_page` writes views to one
HTML file.

The numbers have these meanings:

- `total` is the host time from the start to the end of a span. `self` is the total minus the time of the spans below it
  on the same thread and task.
- A generator's total is the time from its first to its last resumption.
- The device time of a row is the time between its own CUDA events, but at least the sum of the rows below it.
- Rows are sums and may exceed the elapsed time if work runs in parallel.
- The base of every ratio is printed.
- p50 and p99 of the tally have at most 0.8 % relative error.
- Counts, sums, minima and maxima are exact."""
