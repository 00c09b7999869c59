"""The page of a report: one HTML file that needs no network, with the numbers of the views and pictures of the spans.

Python makes every number, by the views and the columns that the text views are made of; the scripts show, sort and
draw them. `html_page` puts the file together: its style, its scripts and d3, which `d3.md` is about, lie beside it.

How much a page holds is bounded, and each bound that left something out is said on the page: see `kept_spans` for
requests and spans, `device_lanes` for calls and devices, `html_page` for rows of tables.
"""
