"""Reports: views that compute numbers from a recording and print them as text.

A view needs only the recording, so a report can be made on any machine. `view` defines the options of views, and the
recording that views read. `section` defines tables, and `html_page` writes views to one HTML file.

`instrument/docs/reports.md` defines each number. In short:
- `total` is the host time of a span, and `self` the part in which no child ran on the same thread and task.
- The device time of a row is the time between its own CUDA events, but at least the sum of the rows below it.
- Rows are sums. They may exceed the elapsed time if work runs in parallel.
- p50 and p99 have at most 0.8 % relative error. Counts, sums, minima and maxima are exact.
"""
