"""Test this machine: versions, devices, attention backends, and which settings stop on it.

Belongs here: findings about a machine. Does not: checks that training itself makes.

Read `doctor.py` first.
"""
