"""Tools: look at documents and plans, and prove exactness on every architecture.

Belongs here: whatever prints, previews or verifies. Does not: anything that training needs.

Read `preview.py` first.
"""
