"""`m3jit serve`: language models over HTTP, as OpenAI's clients expect them.

`engine` runs all texts of a model together in one thread, `requests` checks what clients send, `replies` writes what
they get, `app` joins them as an ASGI application, `server` runs it.
"""
