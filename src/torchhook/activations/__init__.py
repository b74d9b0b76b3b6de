"""Activations of a whole data set: run once, kept in files that anybody reads, resumed where they were left.

Data flows one way: `sources` reads numbered batches, `collecting` runs the model and makes rows of what its sites give,
`writing` puts them into shards, `activations` reads them back. `harvest` is the verb; `on_ray` shares the shards out.
"""
