"""Tensors in, numbers out. One family a file; none knows of alarms or files.

The monitor reads ``gradients.py`` (over ``norms.py``, ``guard.py``, ``packet.py``, ``tape.py`` and, where
parameters are sharded, ``sharding.py`` and ``meeting.py``). The other families are called by hand, as
``docs/signals.md`` shows.
"""
