"""The ``aiordma`` command.

Each subcommand is a module of this package; they are imported only when they run, so that ``aiordma emulate`` starts
fast and needs no pyverbs.
"""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["app", "main"]

app = typer.Typer(
    name="aiordma",
    help="RDMA for async Python, and an emulated ConnectX NIC.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _root() -> None:
    """Make `aiordma` a command with subcommands, however many there are."""


@app.command(
    # Everything from the first word that isn't an option of ours belongs to the command.
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
def emulate(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="the program to run, and its arguments")],
    devices: Annotated[int, typer.Option("--devices", "-n", min=1, max=16, help="how many devices")] = 1,
    name: Annotated[
        list[str] | None, typer.Option(help="a device's name (repeat for more; instead of --devices)")
    ] = None,
    limit: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="a device limit, as max_qp=64")] = None,
    ports: Annotated[int, typer.Option(min=1, max=2, help="ports of each device")] = 1,
    port_state: Annotated[
        str, typer.Option(metavar="STATE", help="of all ports: active, down, init, or armed")
    ] = "active",
    gid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS[,TYPE[,NETDEV]]",
            help="an entry of the GID table of the only port, as 10.0.0.1,v2,eth0 (repeat for more)",
        ),
    ] = None,
    mtu: Annotated[int, typer.Option(help="the ports' active MTU")] = 4096,
    spin_us: Annotated[int, typer.Option(min=0, help="microseconds that the idle device polls before it sleeps")] = 50,
    reach: Annotated[
        str, typer.Option(help="host: this user's other processes are on the same network; process: they aren't")
    ] = "host",
    one_copy: Annotated[
        bool,
        typer.Option(
            "--one-copy/--two-copies", help="long payload between processes is read from the other one's memory, or not"
        ),
    ] = True,
    use_uffd: Annotated[
        bool,
        typer.Option("--userfaultfd/--naps", help="the idle device sleeps until a doorbell rings, or in short naps"),
    ] = True,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND:NAME=VALUE,...", help="something that goes wrong, as drop:opcode=SEND,nth=3 (repeat for more)"
        ),
    ] = None,
    legacy_write: Annotated[bool, typer.Option("--legacy-write", help="behave as a kernel older than 4.20")] = False,
) -> None:
    """Run a program on the emulated NIC: aiordma emulate --devices 2 -- ibv_devinfo."""
    from aiordma.cli.emulate import parse_gids, parse_limits, run
    from aiordma.emulator.config import EmulatedDevice, EmulatedPort, EmulatorConfig

    try:
        limits = parse_limits(limit or [])
        names = name or [f"mlx5_{i}" for i in range(devices)]
        gids = parse_gids(gid or [])
        if gids and len(names) * ports > 1:
            raise ValueError("--gid is for one device with one port: no two ports may have the same address")
        port = EmulatedPort(mtu=mtu, state=port_state, gids=gids or None)  # type: ignore[arg-type]  # checked by the emulator
        config = EmulatorConfig(
            devices=tuple(EmulatedDevice(name=n, ports=(port,) * ports, limits=limits) for n in names),
            spin_us=spin_us,
            legacy_write=legacy_write,
            use_uffd=use_uffd,
            reach=reach,  # type: ignore[arg-type]  # checked by the configuration
            one_copy=one_copy,
            faults=tuple(fault or ()),
        )
    except ValueError as e:
        raise typer.BadParameter(str(e)) from e
    raise typer.Exit(run(config, command))


@app.command()
def devices(
    emulated: Annotated[int, typer.Option(min=0, max=16, help="list so many emulated devices instead")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print the list as JSON")] = False,
) -> None:
    """List the RDMA devices that libibverbs sees, with their ports and GIDs.

    Exit status: 0 if there are any, 1 if there are none or libibverbs can't be asked, 2 for bad usage.
    """
    from aiordma.cli.devices import show

    raise typer.Exit(show(emulated, as_json))


@app.command()
def doctor(
    emulated: Annotated[
        bool, typer.Option("--emulated", help="examine the emulated NIC instead of this machine's devices")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the report as JSON")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="exit with status 1 for warnings too")] = False,
    timeout: Annotated[float, typer.Option(min=1.0, help="seconds for each attempt that may hang")] = 20.0,
) -> None:
    """Find what keeps RDMA from working here, and say what to do about it.

    Exit status: 0 if RDMA should work, 1 if something stops it (with --strict also for warnings), 2 for bad usage.
    """
    from aiordma.cli.doctor import run as examine

    raise typer.Exit(examine(emulated=int(emulated), as_json=as_json, strict=strict, timeout=timeout))


def main() -> None:
    """Run the command line: the console script's entry point."""
    app()
