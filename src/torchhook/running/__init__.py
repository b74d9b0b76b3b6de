"""A script that is watched from outside, as a profiler runs it."""
