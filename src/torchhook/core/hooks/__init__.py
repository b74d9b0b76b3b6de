"""The torch hooks of a session: these files are the only ones that register any.

A `point` is one hooked module or parameter; it installs at most one hook before and one after the forward (`outputs`),
which serve all ports there. Gradients come from tensor hooks that those put on what flows (`gradients`). Where a
checkpoint runs a forward again in the backward, edits act again and late gradients are caught (`replay`).
`registration` has the hooks that belong to no session.

A hook holds its session weakly, and a copy or a pickle of it is an inert object of the standard library: copies of a
hooked model record nothing and load anywhere. A hook that ``torch.compile`` traces leaves its steps in the graph
instead (see `core.compiled`).
"""
