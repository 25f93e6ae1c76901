"""Runs recorded to a file, repeated from it, and looked at forward and backward.

`log_file` is the file, `wire` its values; `record` and `replay` are runs, `steering` what a host adds to them token by
token, `hosting` what it does to the machine of a conversation; `engine`, `machine_state`, `history`, `stops`, `views`,
`turns`, `differences` and `debugger` are the debugger, which `m3jit.cli.debugging` shows on a terminal.
"""
