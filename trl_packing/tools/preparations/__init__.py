"""Two preparations of one data set compared: with TRL's, another config or template.

Belongs here: tokens and labels side by side. Does not: training.

Read `compare.py` first.
"""
