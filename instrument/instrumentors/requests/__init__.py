"""Record the requests of servers, and continue the traces of their callers."""
