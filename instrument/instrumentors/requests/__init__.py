"""Records the requests of servers, and the traces that they continue."""
