"""The tiers of ``Monitor``: which signals are looked at when, and how they come together to one reading.

``schedule.py`` says when; ``look.py`` lets the families of ``signals/`` look and sends what they find on its
way; ``company.py`` takes it from other ranks to rank 0; ``decode.py`` makes readings of it.
"""
