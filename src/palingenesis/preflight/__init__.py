"""Before the run: what is wrong with data, masks, memory or configuration, without training.

    target     what is looked at: a configuration, or a model and data
    samples    the samples that training would see, each with where it comes from
    inspect    a few samples, token by token
    validate   many samples, checked on the batches that training would see

Data, masks and batches come from :mod:`palingenesis.sft`, as ``pgs train`` has them. Nothing here imports
torch or transformers before it is used.
"""
