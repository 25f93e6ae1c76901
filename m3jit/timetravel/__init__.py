"""Runs recorded to a file, repeated from it, and looked at forward and backward.

`log_file` is the file, `wire` its values; `record` and `replay` are runs; `engine`, `machine_state`, `stops` and `views` are
the debugger, which `m3jit.cli.debug` shows on a terminal.
"""
