"""`m3jit serve`."""
from __future__ import annotations

import ipaddress
import os
from typing import Any

import click

from m3jit.cli.options import Finite, Size, UsageError, Whole
from m3jit.cli.sampling import weights_options
from m3jit.errors import UserError

WAITING_FOR_VECTORS = 8                                # requests; each takes a thread of the web framework's pool


@click.command(epilog="GET /health and /metrics say how it is. SIGTERM or Ctrl-C ends it in good order.")
@click.argument("model", default="default")
@click.option("--host", metavar="ADDRESS", default="127.0.0.1", show_default=True,
              help="Where to listen; 0.0.0.0: on every network of this machine.")
@click.option("--port", "-p", type=Whole(0, 65535), metavar="N", default=8080, show_default=True,
              help="0: a free one, which is printed.")
@click.option("--name", "names", multiple=True, metavar="NAME",
              help="Name clients know the model by [MODEL]; repeated: all of them.")
@click.option("--api-key", "keys", multiple=True, metavar="KEY", envvar="M3JIT_API_KEY",
              help="Let only clients with this key in (also from the environment: M3JIT_API_KEY).")
@click.option("--batch", type=Whole(1, 1024), metavar="N", default=16, show_default=True,
              help="Texts that are generated at once.")
@click.option("--queue", type=Whole(0, 100_000), metavar="N", default=64, show_default=True,
              help="Texts that may wait; more are refused with status 429.")
@click.option("--context", type=Whole(1), metavar="N", help="Tokens of a prompt and its text [the model's].")
@click.option("--chat-template", metavar="FILE", help="A jinja2 template in place of the model's.")
@click.option("--max-body", type=Size(of="request as large as clients send"), metavar="SIZE", default="4M",
              show_default=True, help="Largest request.")
@click.option("--drain", type=Finite(0, 86400), metavar="SECONDS", default=10, show_default=True,
              help="How long the end waits for texts that are being generated.")
@click.option("--body-timeout", type=Finite(0.01, 86400), metavar="SECONDS", default=30, show_default=True,
              help="How long a client may take to send a request.")
@click.option("--prefix-memory", type=Size(zero=True, of="states"), metavar="SIZE", default="512M",
              show_default=True,
              help="Memory for states of earlier texts, from which prompts that begin like them start; 0: none.")
@click.option("--keep-responses", type=Whole(0), metavar="N", default=64, show_default=True,
              help="Responses that can be edited after they have ended; 0: none can, running or not.")
@click.option("--keep-memory", type=Size(zero=True, of="states"), metavar="SIZE", default="256M",
              show_default=True, help="Memory that these may reach.")
@click.option("--memory-limit", type=Size(), metavar="SIZE",
              help="Most memory; a text that wants more ends with an error [three quarters of what is free].")
@click.option("--threads", "-t", type=Whole(1, 256), metavar="N", help="Threads [all CPUs it may use].")
@click.option("--backend", metavar="NAME", default="auto", show_default=True, help="As m3jit run.")
@weights_options
def serve(model: str, host: str, port: int, names: tuple[str, ...], keys: tuple[str, ...], batch: int, queue: int,
          context: int | None, chat_template: str | None, max_body: int, drain: float, body_timeout: float,
          prefix_memory: int, keep_responses: int, keep_memory: int, threads: int | None, backend: str,
          memory_limit: int | None, kv_type: str | None, lora: tuple[str, ...]) -> int:
    """Serve MODEL (a file, a folder, a name, or the embedded default) over HTTP, as OpenAI's clients expect it."""
    from m3jit.api.generation import load_model
    from m3jit.cli.chat import template_text
    from m3jit.cli.machine import limit_memory
    from m3jit.cli.sampling import model_options
    from m3jit.cli.terminal import note
    from m3jit.models.provider import Models
    from m3jit.serve.server import Server, needs_libraries
    needs_libraries()
    limit_memory(memory_limit)
    for option, given in (("--api-key", keys), ("--name", names)):
        if not all(given):
            raise UsageError(f"{option}: is empty")
    from m3jit.serve.app import Limits
    from m3jit.serve.embeddings import Vectors
    from m3jit.vm.regions import check as check_backend
    check_backend(backend)                             # before a model is loaded
    found = Models().load(model)
    loaded, options = None, model_options({"kv_type": kv_type, "lora": lora})
    if found.generates:
        loaded = load_model(model, backend=backend, threads=threads, context=context,
                            chat_template=template_text(chat_template),
                            options=options, prefix_memory=prefix_memory)
        if chat_template is None:
            warn_of_template(loaded)
    vectors = Vectors(model, backend, threads, min(queue, WAITING_FOR_VECTORS), options)
    if loaded is None:
        vectors.load()                                 # what is wrong with it is said now
    server = Server(loaded, vectors, names or (os.path.basename(model),), host=host, port=port, batch=batch,
                    queue=queue, limits=Limits(keys, max_body, drain, body_timeout, keep_responses, keep_memory))
    if not keys and not ipaddress.ip_address(server.host).is_loopback:
        note(f"warning: whoever reaches {server.host} can use this server; give it an --api-key")
    if server.engine is not None:
        server.engine.warm()
    note(f"serving {found.name} at {server.url}/v1")
    try:
        server.run()
    except (KeyboardInterrupt, SystemExit):            # uvicorn raises its signals again when it has ended
        pass
    note("stopped")
    return 0


def warn_of_template(model: Any) -> None:
    """Say now that the model's own chat template cannot be read: chats will be refused, all else goes on."""
    from m3jit.cli.terminal import note
    from m3jit.models.model_error import ModelFileError
    try:
        model.template()
    except ModelFileError as error:
        note(f"warning: {error} Chat requests are refused; --chat-template FILE gives another template")
    except UserError:                                  # the model has none, as those that only continue texts
        pass
