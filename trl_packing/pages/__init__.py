"""Pages that people open: one HTML file each. `page.py` makes them of templates."""
