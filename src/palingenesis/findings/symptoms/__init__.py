"""Symptoms: what a record shows of each pathology. One function each: a case in, a finding or nothing out."""
