"""Models, data, doubles and slow references that tests share."""
