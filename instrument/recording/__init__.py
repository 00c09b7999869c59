"""The recording: rows, totals, sites and spans, in the form that recorders and readers share."""
