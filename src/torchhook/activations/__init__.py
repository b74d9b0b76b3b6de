"""The activations of a whole data set on disk: written once, resumed after an interruption, read by anyone.

Data flows one way:

    sources + collate   read data of any kind as numbered batches
    collector           runs the model on a batch and turns the outputs of its sites into rows
    writer              writes the rows of each batch to shards, in a thread of its own
    store_files         the files of a store: where they are, the manifest, the journals
    mapped              reads the rows of those files, by memory map
    column + batches    the rows of one site: by index, or in batches, in order or shuffled
    store               `Activations`, all sites of a store

`harvest` is the verb: `estimate` runs one batch to predict size and time, `worker` harvests the missing batches, and
`on_ray` does the same on several machines. `fingerprints` tell whether the model and the data are still the same.
"""
