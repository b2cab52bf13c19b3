"""Test this machine: versions, devices, backends, memory of a model.

Belongs here: findings about a machine, and the arithmetic of memory. Does not: checks that
training itself makes.

Read `doctor.py` first.
"""
