"""What is checked before a run, one concern a file.

documents  masks of collated documents, against the messages they were made of
text       what was written: wrong encodings, control characters, scripts
setup      the tokenizer against the model
packing    documents in one row: kept apart, and what packing saves
"""
