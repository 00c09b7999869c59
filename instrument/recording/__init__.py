"""The recording: rows, totals, sites and spans, as those who record and those who read share them."""
