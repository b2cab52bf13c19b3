"""Tools beside training: look at a run before it starts, verify, examine a machine.

preview.py              a run's settings, and single rows as documents
rows.py                 the packed rows of an epoch, which a page shows
training_command.py     a training command, read as the recipes read it

Belongs here: code that prints, previews or verifies. Does not: code that training needs.

Read `preview.py` first.
"""
