"""Pages: what a person looks at, as HTML with its CSS and JavaScript, or as text.

Belongs here: templates, charts, the record of a run that a page shows, and the words of documents.
Does not: what a run plans, counts or trains; a plan and an epoch are given to the functions here.

Read `page.py` first.
"""
