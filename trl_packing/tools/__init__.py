"""Tools beside training: look at a run before it starts, compare runs, verify, examine a machine.

command/        a training command, read as the recipes read it
preview/        its settings, and single rows as documents
plan/ rows/     the epoch and its packed rows, with their pages
preparations/   two preparations of one data set
runs/           runs that were trained
doctor/         this machine
exactness/      whether one model keeps documents apart

Belongs here: code that prints, previews or verifies. Does not: code that training needs.

Read `preview/previewed_run.py` first.
"""
