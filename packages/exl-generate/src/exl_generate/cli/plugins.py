"""Commands that other packages add to `exl`: entry points of the group `exl.commands`.

An entry point's name is the command's, its object a `typer.Typer`: a command, or a group of them. It is imported when
the command runs or is listed, so the module behind it should import little.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
from typer.core import TyperGroup

__all__ = ["GROUP", "CommandGroup"]

GROUP = "exl.commands"


class CommandGroup(TyperGroup):
    """The built-in commands, then those of other packages; no package replaces a built-in one."""

    def get_params(self, ctx: Any) -> Any:
        """Return the parameters of the group itself."""
        return _without_types_of_flags(super().get_params(ctx))

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the built-in commands, then the names of other packages' commands in order."""
        own = super().list_commands(ctx)
        return [*own, *sorted(set(_found()) - set(own))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by name, imported from its package if it is not built in; None for an unknown name."""
        command: Any = super().get_command(ctx, cmd_name)
        if command is None:
            entry = _found().get(cmd_name)
            if entry is None:
                return None
            command = typer.main.get_command(_load(entry))
            command.name = entry.name
        _show_flags(command, ctx)
        return command


def _show_flags(command: Any, ctx: Any) -> None:
    """Show the flags of a command, and of the commands of a group, without a type in their help."""
    _without_types_of_flags(command.get_params(ctx))
    for inner in getattr(command, "commands", {}).values():
        _show_flags(inner, ctx)


def _without_types_of_flags(parameters: Any) -> Any:
    """Return the parameters, those that are flags without a type: `--json <bool>` reads as if it took a value."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False) and parameter.metavar is None:
            parameter.metavar = ""
    return parameters


def _found() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _load(entry: EntryPoint) -> typer.Typer:
    """The command, or one that says which package is broken: the others go on working."""
    try:
        found: Any = entry.load()
        if not isinstance(found, typer.Typer):
            raise TypeError(f"{entry.value} is a {type(found).__name__}, not a typer.Typer")
    except Exception as error:
        return _broken(entry, error)
    return found


def _broken(entry: EntryPoint, error: Exception) -> typer.Typer:
    package = "an unknown package" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
    text = f"cannot be loaded from {package}: {type(error).__name__}: {error}"
    app = typer.Typer()

    @app.command(
        help=f"({text})",
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
    def fail() -> None:
        from exl_generate.errors import RequestError

        raise RequestError(f"the command {entry.name!r} {text}; reinstall or remove that package") from error

    return app
