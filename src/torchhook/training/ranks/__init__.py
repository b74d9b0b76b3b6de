"""One run for all ranks of a training: what each of them measured goes up a tree, and is merged on the way.

`seat` says which part of the model and of the data a rank has. `share` is what some ranks measured in one step, and how
shares are merged. `wire` makes bytes of a share. `tree` connects the ranks. `gather` is the thread that does all this.
"""
