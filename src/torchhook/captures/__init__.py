"""Keep the values that flow through a model: captures, traces, the classic hook manager, the list of hooks."""
