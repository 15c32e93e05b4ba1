"""The ``aiordma`` command.

Each subcommand is a module of this package; they are imported only when they run, so that ``aiordma emulate`` starts
fast and needs no pyverbs.
"""

from __future__ import annotations

from typing import Annotated

import typer

from aiordma.cli._perf_settings import DEFAULT_PORT, MAX_QPS, Kind, Loop, QpType, Settings

__all__ = ["app", "main"]

app = typer.Typer(
    name="aiordma",
    help="RDMA for async Python, and an emulated ConnectX NIC.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from aiordma import __version__, _pyverbs

        typer.echo(f"aiordma {__version__}, rdma-core {_pyverbs.version()}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="print the versions of aiordma and rdma-core"
        ),
    ] = False,
) -> None:
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
    timeout: Annotated[float, typer.Option(min=1.0, help="seconds that something may take that may hang")] = 20.0,
) -> None:
    """Find what keeps RDMA from working here, and say what to do about it.

    Exit status: 0 if RDMA should work, 1 if something stops it (with --strict also for warnings), 2 for bad usage.
    """
    from aiordma.cli.doctor import run as examine

    raise typer.Exit(examine(emulated=int(emulated), as_json=as_json, strict=strict, timeout=timeout))


@app.command()
def perf(
    test: Annotated[Kind, typer.Argument(help="what to measure")],
    host: Annotated[
        str | None, typer.Argument(help="the server's name or address; without it this is the server")
    ] = None,
    port: Annotated[int, typer.Option("-p", "--port", min=0, max=65535, help="TCP port, or rdma_cm's")] = DEFAULT_PORT,
    device: Annotated[str | None, typer.Option("-d", "--ib-dev", help="the device")] = None,
    emulated: Annotated[bool, typer.Option("--emulated", help="use the emulated NIC")] = False,
    ib_port: Annotated[int | None, typer.Option("-i", "--ib-port", min=1, max=255, help="the device's port")] = None,
    gid_index: Annotated[int | None, typer.Option("-x", "--gid-index", min=0, help="index in the GID table")] = None,
    size: Annotated[int | None, typer.Option("-s", "--size", help="bytes of an operation (2; bandwidth 65536)")] = None,
    all_sizes: Annotated[bool, typer.Option("-a", "--all", help="sizes from 2 to 2^23")] = False,
    iterations: Annotated[
        int | None, typer.Option("-n", "--iters", min=1, help="operations (1000; bandwidth 5000)")
    ] = None,
    duration: Annotated[float | None, typer.Option("-D", "--duration", help="seconds, instead of -n")] = None,
    warmup: Annotated[int, typer.Option(min=0, help="operations before those that count; bandwidth: one a QP")] = 100,
    qps: Annotated[int, typer.Option("-q", "--qp", min=1, max=MAX_QPS, help="QPs (bandwidth)")] = 1,
    qp_type: Annotated[QpType, typer.Option("-c", "--connection", help="transport")] = QpType.RC,
    depth: Annotated[
        int, typer.Option("-t", "--tx-depth", min=1, max=1 << 16, help="operations outstanding on a QP (bandwidth)")
    ] = 128,
    batch: Annotated[
        int, typer.Option("-l", "--post-list", min=1, help="operations posted and awaited together (bandwidth)")
    ] = 1,
    inline: Annotated[
        int | None, typer.Option("-I", "--inline-size", min=0, max=4096, help="send up to so many bytes inline")
    ] = None,
    loop: Annotated[Loop, typer.Option(help="the event loop")] = Loop.ASYNCIO,
    spin: Annotated[float, typer.Option(min=0, help="microseconds that an await polls before it sleeps")] = 20.0,
    verify: Annotated[bool, typer.Option("--verify", help="check that the data that arrives is what was sent")] = False,
    rdma_cm: Annotated[bool, typer.Option("-R", "--rdma-cm", help="connect by rdma_cm instead of TCP")] = False,
    loopback: Annotated[bool, typer.Option("--loopback", help="both ends in this program, for a quick look")] = False,
    histogram: Annotated[bool, typer.Option("-H", "--histogram", help="show the distribution of latencies")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the results as JSON")] = False,
    force: Annotated[
        bool, typer.Option("-F", help="does nothing: perftest's, accepted from habit", hidden=True)
    ] = False,
) -> None:
    """Measure latency or bandwidth between two hosts: start it on one, then with that one's name on the other.

    Exit status: 0 if all went well, 1 if not (also for wrong data with --verify), 2 for bad usage, 130 when interrupted.
    """
    try:
        settings = Settings(
            test=test,
            host=host,
            port=port,
            device=device,
            emulated=emulated,
            ib_port=ib_port,
            gid_index=gid_index,
            size=size,
            all_sizes=all_sizes,
            iterations=iterations,
            duration=duration,
            warmup=warmup,
            qps=qps,
            qp_type=qp_type,
            depth=depth,
            batch=batch,
            inline=inline,
            loop=loop,
            spin_us=spin,
            verify=verify,
            rdma_cm=rdma_cm,
            loopback=loopback,
            json=as_json,
            histogram=histogram,
        )
    except ValueError as e:
        raise typer.BadParameter(str(e)) from e
    from aiordma.errors import ProviderError

    try:
        from aiordma.cli.perf import run as measure
    except ProviderError as e:
        typer.echo(f"aiordma perf: {e}\n`aiordma doctor` examines what is wrong.", err=True)
        raise typer.Exit(1) from None
    raise typer.Exit(measure(settings))


def main() -> None:
    """Run the command line: the console script's entry point."""
    app()
