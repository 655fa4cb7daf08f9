"""Any trainer's log in, one table out: :func:`palingenesis.runlogs.read.read_log` gives a ``RunLog``.

One file a format; ``table.py`` is what all of them make.
"""
