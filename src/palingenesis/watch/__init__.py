"""Numbers in, events out: state machines over numpy arrays.

``reading.py`` is what they are fed, ``layer_alarms.py`` the alarm rule, ``baseline.py``,
``presence.py`` and ``common.py`` what it is built on, ``between.py``, ``loss.py``, ``nonfinite.py``
and ``skips.py`` the other conditions, ``incidents.py`` the order in which alarms are told.
Nothing here imports torch, opens a file or logs.
"""
