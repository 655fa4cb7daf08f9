"""The record: what a run leaves on disk, written so that a crash costs at most one line.

    format    names of the files, and the one strict JSON every line is written in
    lines     whole lines, appended to or read from one file
    lock      one writer to a folder
    writer    RecordWriter, which a monitor writes through
    folder    which folders hold a run, and one that this version can read
    reader    load_run: a folder in, a Run out
    columns   rows turned into numpy arrays by name
    seal      what metrics and layers came to at the end
    verify    is the record as it was written?
    spikes    what was in the batch when the loss spiked
    verdict   one word on a run

Nothing here imports torch.
"""
