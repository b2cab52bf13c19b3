"""HTML pages: the shell, tables, cards and charts that all pages share.

Belongs here: HTML, CSS and SVG made from plain values. Does not: anything that knows a data set, a
run or a model; each page stands beside its subject (`tools/plan/page.py`, `training/run_page.py`).

Read `page.py` first.
"""
