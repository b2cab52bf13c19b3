"""Tools that show documents and plans, and that verify exactness on every architecture.

Belongs here: code that prints, previews or verifies. Does not: code that training needs.

Read `preview.py` first.
"""
