"""The page of a report: one HTML file that needs no network, with the numbers of the views and pictures of the spans.

Python computes every number. The tables are those of the text views. The scripts show, sort and draw the numbers.
`html_page` puts the style, the scripts and d3 (see `d3.md`), which are files of this folder, into one file.

The size of a page is bounded, and the page names each bound that left something out. `kept_spans` has the bounds of
requests and spans, and `html_page` all other bounds.
"""
