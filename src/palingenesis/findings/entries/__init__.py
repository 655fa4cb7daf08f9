"""What each finding means: one file a section, each with ``ENTRIES``, gathered by ``findings/catalog.py``.

A section's file imports ``Entry`` from ``palingenesis.findings.entry``, so that it can be imported alone.
"""
