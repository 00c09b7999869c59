"""The recording: rows, totals, sites and spans, in the layout that recorders and readers share."""
