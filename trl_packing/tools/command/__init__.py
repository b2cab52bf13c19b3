"""Read a training command as the recipes read it, and errors that fit a terminal.

Belongs here: parsing of options, spelling help, exit messages. Does not: anything that prepares
data.

Read `training_command.py` first.
"""
