"""Watch a training and keep its run: the monitor, the launcher, runs on disk, logs.

A measured step takes five forms between a hook and a page. A `Cell` adds up the values at one place while the model
runs. A `Snapshot` is what all cells of a step say, one row per place. An `Entry` is that snapshot with its step, loss
and learning rate: logs get it, a `History` keeps it, and a `Run` returns it. A `Group` holds the states of many places
that are stored together, for one step or several. A `Series` is one number by place and step, ready to draw.
"""
