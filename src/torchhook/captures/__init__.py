"""Keep what flowed: captures, traces, the classic hook manager, the list of hooks."""
