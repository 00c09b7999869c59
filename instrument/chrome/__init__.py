"""Chrome trace JSON, the file that Perfetto shows: written from a trace, and read back into one.

`lanes` finds the place of every slice and the arrows between them, `writing` makes the file, `reading` takes it back,
as it does the files of other profilers. Both ways share `text`, the JSON, and `metadata`, the facts beside the events.
`joining` puts what torch.profiler saw beside our spans.

Viewers need only the events. What else a trace knows stands in the top-level key `instrument`, which they ignore, so
that `load` returns what `dump` was given, to the nanosecond. What changes on the way: a lone surrogate becomes the
replacement character and, in attributes, a sequence becomes a tuple, a number that JSON or int64 does not have becomes
text, and a value of any other type becomes the type's name in angle brackets.
"""

from instrument.chrome.joining import join
from instrument.chrome.reading import load, read
from instrument.chrome.writing import dump, file_name

__all__ = ["dump", "file_name", "join", "load", "read"]
