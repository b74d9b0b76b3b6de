"""The torch hooks of a session: only these files register any.

A `point` is one hooked module or parameter. It installs at most one hook before and one after the forward (`outputs`),
which serve all ports there. Gradients are caught by hooks on tensors (`tensors`) that those register on the values that
flow (`gradients`). When a checkpoint repeats a forward in the backward, edits act again and late gradients are caught
(`replay`). A hook that only keeps values is called by a `shortcut` while it is the only one. `registration` has the
hooks that do not belong to a session.

A hook holds its session weakly, and a copy or a pickle of a hook is an inert object of the standard library: copies of
a hooked model record nothing and load anywhere. A hook that ``torch.compile`` traces leaves its steps in the graph
instead (see `core.compiled`).
"""
