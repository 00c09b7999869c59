"""The span processor of a recording: reads it, joins requests by their keys, and hands what is kept to an exporter."""
