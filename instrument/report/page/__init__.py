"""The page of a report: one HTML file that needs no network, with the numbers of the views and pictures of the spans.

Python computes every number. The tables are those of the text views. The scripts show, sort and draw the numbers.
`html_page` joins the file's parts: its style, its scripts and d3 (see `d3.md`), which are files of this folder.

The size of a page is bounded, and the page names each bound that left something out: see `kept_spans` for requests and
spans, `device_lanes` for calls and devices, `html_page` for rows of tables.
"""
