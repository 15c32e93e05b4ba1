"""``python -m kv_cache serve | put | get | load``."""

from __future__ import annotations

import argparse
import random
import sys

import anyio

import aiordma
from kv_cache.client import Client
from kv_cache.server import serve


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="kv_cache", description="A key-value cache over RDMA.")
    parser.add_argument("--backend", choices=["asyncio", "uvloop", "trio"], default="asyncio")
    commands = parser.add_subparsers(dest="command", required=True)
    every = argparse.ArgumentParser(add_help=False)
    every.add_argument("--host", default="127.0.0.1", help="where the server is, or listens")
    every.add_argument("--port", type=int, default=18600)
    every.add_argument("--device", help="an RDMA device's name (default: the first, or the emulated NIC)")
    every.add_argument("--via", choices=["rdma_cm", "tcp"], help="default: rdma_cm where the system has it")
    server = commands.add_parser("serve", parents=[every], help="run the server")
    server.add_argument("--slots", type=int, default=1024)
    server.add_argument("--slot-bytes", type=int, default=4096)
    put = commands.add_parser("put", parents=[every], help="store a value")
    put.add_argument("key")
    put.add_argument("value")
    get = commands.add_parser("get", parents=[every], help="fetch a value")
    get.add_argument("key")
    load = commands.add_parser("load", parents=[every], help="clients that put and get, and check what they get")
    load.add_argument("--clients", type=int, default=4)
    load.add_argument("--keys", type=int, default=200)
    load.add_argument("--seconds", type=float, default=5.0)
    load.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def value_of(key: bytes, number: int, length: int) -> bytes:
    """A value that shows whether it's whole and this key's."""
    unit = number.to_bytes(8, "big") + key
    return (unit * (length // len(unit) + 1))[:length]


def is_whole(key: bytes, value: bytes) -> bool:
    """Whether value_of() made it."""
    return value == value_of(key, int.from_bytes(value[:8], "big"), len(value))


async def _load(options: argparse.Namespace) -> None:
    wrong: list[bytes] = []
    totals = {"puts": 0, "hits": 0, "misses": 0, "reads": 0, "stale reads": 0, "reconnects": 0}
    deadline = anyio.current_time() + options.seconds

    async def client(device: aiordma.Device, number: int) -> None:
        dice = random.Random(options.seed * 1000 + number)
        async with Client(device, options.host, options.port, via=options.via) as cache:
            count = 0
            while anyio.current_time() < deadline:
                key = f"key {dice.randrange(options.keys)}".encode()
                if dice.random() < 0.3:
                    count += 1
                    await cache.put(key, value_of(key, number << 32 | count, dice.randrange(100, 3000)))
                    totals["puts"] += 1
                elif (value := await cache.get(key)) is None:
                    totals["misses"] += 1
                else:
                    totals["hits"] += 1
                    if not is_whole(key, value):
                        wrong.append(key)
            totals["reads"] += cache.reads
            totals["stale reads"] += cache.stale_reads
            totals["reconnects"] += cache.reconnects

    async with aiordma.open_device(options.device) as device, anyio.create_task_group() as tasks:
        for number in range(options.clients):
            tasks.start_soon(client, device, number)
    print(", ".join(f"{name}: {value}" for name, value in totals.items()), flush=True)
    if wrong:
        sys.exit(f"values that nobody had put: {wrong}")
    print("every value was whole", flush=True)


async def _main(options: argparse.Namespace) -> None:
    if options.command == "serve":
        await serve(
            options.host,
            options.port,
            slots=options.slots,
            slot_bytes=options.slot_bytes,
            device=options.device,
            via=options.via,
            ready=lambda port: print(f"listening on port {port}", flush=True),
        )
    elif options.command == "load":
        await _load(options)
    else:
        async with (
            aiordma.open_device(options.device) as device,
            Client(device, options.host, options.port, via=options.via) as cache,
        ):
            if options.command == "put":
                await cache.put(options.key.encode(), options.value.encode())
            else:
                value = await cache.get(options.key.encode())
                print("nothing there" if value is None else value.decode(errors="replace"))


if __name__ == "__main__":
    chosen = _arguments()
    anyio.run(
        _main,
        chosen,
        backend="trio" if chosen.backend == "trio" else "asyncio",
        backend_options={"use_uvloop": True} if chosen.backend == "uvloop" else {},
    )
